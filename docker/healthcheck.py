"""Exits with 0 while the server in this container accepts requests (/ready answers 200), else with 1.

The slim image has no curl. Only the standard library is imported, so a probe costs a few milliseconds of import.
"""

from __future__ import annotations

import os
import sys
import urllib.request


def main() -> int:
    """The exit status, after one request without the proxies of the environment."""
    url = f"http://127.0.0.1:{os.environ.get('CELLAR_PORT', '8000')}/ready"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=2.5):
            return 0
    except OSError as error:  # URLError, HTTPError (503) and timeouts are all OSErrors
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
