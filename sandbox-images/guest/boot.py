"""Installed as /opt/toolcrew/__main__.py: what the sandbox's entry point runs."""

from guest.loop import main

main()
