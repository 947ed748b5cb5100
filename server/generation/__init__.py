"""From a validated request to events of the engine: what all APIs share."""
