"""The program that the sandbox's entry point runs, installed as /opt/toolcrew/__main__.py.

Every Python 3 can parse this file, so that an unsuitable interpreter reports what is wrong with it.
"""

import sys

if sys.version_info < (3, 9):  # noqa: UP036
    sys.exit("toolcrew guest: this image's python3 is %d.%d; Python 3.9 or later is needed" % sys.version_info[:2])  # noqa: UP031
try:
    from guest.loop import main, parse_options
except ImportError as error:
    sys.exit("toolcrew guest: this image's python3 lacks a part of the standard library: %s" % error)  # noqa: UP031
try:
    options = parse_options(sys.argv[1:])
except ValueError as error:
    sys.exit("toolcrew guest: %s" % error)  # noqa: UP031
main(options)
