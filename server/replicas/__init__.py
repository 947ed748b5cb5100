"""Replicas of the server: on Ray Serve (cluster.py, deployment.py and router.py need Ray), or behind `cellar route`."""
