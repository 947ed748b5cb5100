"""The routes, one module for each API. They are added to the app itself, so that app.routes lists them all."""
