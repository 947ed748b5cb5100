"""The routes, a file a noun. Each is added to the app itself, so that app.routes lists them all."""
