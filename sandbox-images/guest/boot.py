"""Installed as /opt/toolcrew/__main__.py: what the sandbox's entry point runs."""

import sys

from guest.loop import main
from guest.options import parse_options

main(parse_options(sys.argv[1:]))
