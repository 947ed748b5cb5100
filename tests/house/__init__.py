"""Rules of the code: imports go down, exceptions are caught at boundaries, the README's options are up to date."""
