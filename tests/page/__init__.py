"""The web page in headless Chromium, over a real server of the bundled model (`make test-browser`)."""
