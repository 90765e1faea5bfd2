"""The program that the sandbox's entry point runs, installed as /opt/toolcrew/__main__.py."""

import os
import sys

from guest.loop import main, parse_options, read_options_of_pid_1
from guest.paths import GuestPaths
from guest.users import find_user_name

is_stream_server = sys.argv[1:] == ["--streams"]
try:
    options = read_options_of_pid_1() if is_stream_server else parse_options(sys.argv[1:])
except ValueError as error:
    sys.exit(f"toolcrew guest: {error}")
paths = GuestPaths(has_all_files=os.geteuid() == 0, cpus=options.cpus)
# If the image does not know the user of the sandbox, many programs use these variables.
user = find_user_name(os.geteuid()) or ("root" if os.geteuid() == 0 else "sandbox")
paths.add_variables({"USER": user, "LOGNAME": user})
paths.add_image_variables(os.environ)
if is_stream_server:
    from guest.streams.entry import serve_streams

    if options.proxy_port is not None:
        paths.offer_proxy(options.proxy_port)
    serve_streams(0, 1, paths)
else:
    main(options, paths)
