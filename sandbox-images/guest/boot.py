"""The program that the sandbox's entry point runs, installed as /opt/toolcrew/__main__.py."""

import os
import sys

from guest.loop import main, parse_options
from guest.paths import GuestPaths
from guest.users import find_user_name

try:
    options = parse_options(sys.argv[1:])
except ValueError as error:
    sys.exit(f"toolcrew guest: {error}")
paths = GuestPaths(has_all_files=os.geteuid() == 0, cpus=options.cpus)
# If the image does not know the user of the sandbox, many programs use these variables.
user = find_user_name(os.geteuid()) or ("root" if os.geteuid() == 0 else "sandbox")
paths.add_variables({"USER": user, "LOGNAME": user})
paths.add_image_variables(os.environ)
main(options, paths)
