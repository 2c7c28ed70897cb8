"""The client: `pydanube.connect` and what it returns. Everything here runs on the application's own event loop."""
