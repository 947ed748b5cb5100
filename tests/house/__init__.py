"""Rules of the code: imports go down, files stay small, some things never are."""
