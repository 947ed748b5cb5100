"""Ray Serve is imported before the tests: it declares its models in a deprecated form of pydantic."""

import importlib.util
import warnings

collect_ignore: list[str] = []

if importlib.util.find_spec("ray") is None or importlib.util.find_spec("ray.serve") is None:
    # test_replicas.py has the reason.
    collect_ignore.append("test_router.py")
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import ray.serve  # noqa: F401
