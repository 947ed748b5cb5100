"""Rules of the code: imports go down, exceptions are caught at boundaries, generated pages are up to date."""
