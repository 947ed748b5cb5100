"""What developers measure: peers beside ours, and the parts alone. Users have `cellar bench` (bench/)."""
