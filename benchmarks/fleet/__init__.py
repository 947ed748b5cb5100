"""Several servers: routers, Ray Serve and a simulator."""
