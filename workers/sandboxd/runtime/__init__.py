"""Start and removal of containers. Only this folder imports the package `docker`."""
