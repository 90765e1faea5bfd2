"""Tables of dangerous commands. Data only, one line per danger, so that people can review them."""

WHOLE_TREES = frozenset(
    {
        "/",
        "//",
        "$HOME",
        "~root",
        "/root",
        "/home",
        "/bin",
        "/boot",
        "/dev",
        "/etc",
        "/lib",
        "/lib32",
        "/lib64",
        "/media",
        "/mnt",
        "/opt",
    }
    | {
        "/proc",
        "/run",
        "/sbin",
        "/srv",
        "/sys",
        "/usr",
        "/usr/bin",
        "/usr/lib",
        "/usr/local",
        "/usr/sbin",
        "/usr/share",
        "/var",
        "/var/lib",
    }
    | {"/nix", "/snap", "/Users", "/Library", "/System", "/Applications"}
)
"""Folders that no command may remove or empty, because this is never intended."""

OWN_FOLDERS = ("/workspace", "/tmp")
"""Folders of a sandbox that belong to the agent. A command may remove files below these folders if it names the files.
"""

SYSTEM_FOLDERS = (
    *(
        "/etc/",
        "/boot/",
        "/bin/",
        "/sbin/",
        "/lib/",
        "/lib64/",
        "/usr/",
        "/sys/",
        "/proc/",
        "/root/",
        "/var/lib/",
        "/var/run/",
        "/run/",
    ),
    *("$HOME/.ssh/", "$HOME/.bashrc", "$HOME/.profile", "$HOME/.bash_profile", "$HOME/.zshrc"),
)
"""Files and folders of the system. Writes there outlast the task, or change the behavior of other programs."""

HARMLESS_DEVICES = frozenset(
    f"/dev/{name}"
    for name in (
        "null",
        "zero",
        "full",
        "stdin",
        "stdout",
        "stderr",
        "fd",
        "tty",
        "pts",
        "ptmx",
        "shm",
        "random",
        "urandom",
        # Bash connects to a port in place of opening these.
        "tcp",
        "udp",
    )
)

HOST_CONTROLS = (
    r"/proc/sysrq-trigger",
    r"/proc/sys/kernel/(core_pattern|modprobe|hotplug|sysrq|panic.*)",
    r"/proc/sys/fs/binfmt_misc/.*",
    r"/proc/[^/]+/(mem|root/.*)",
    r"/sys/kernel/uevent_helper",
    r"/sys/.*/release_agent",
    r"/sys/firmware/.*",
)
"""Files that affect the host, or allow an escape from the container, if they are written."""

DEVICE_TOOLS = frozenset(
    {"mkfs", "mke2fs", "mkswap", "mkntfs", "wipefs", "shred", "blkdiscard", "badblocks", "pvcreate"}
)
"""Programs that erase their target; mkfs.* are included too. On a device this is catastrophic, on a file dangerous."""

WRITERS = frozenset({"dd", "tee", "truncate"})
COPIERS = frozenset({"cp", "mv", "install", "ln"})
"""WRITERS write to all their operands, COPIERS to the last one."""

DECODERS = frozenset(
    {
        "curl",
        "wget",
        "fetch",
        "base64",
        "base32",
        "xxd",
        "openssl",
        "uudecode",
        "gunzip",
        "zcat",
        "nc",
        "ncat",
        "gpg",
        "rev",
        "tr",
    }
)
INTERPRETERS = frozenset({"python", "perl", "ruby", "node", "php", "lua", "tclsh", "deno", "bun", "osascript"})

DANGEROUS_PROGRAMS = {
    "sudo": "runs with the rights of another user",
    "doas": "runs with the rights of another user",
    "pkexec": "runs with the rights of another user",
    "su": "runs with the rights of another user",
    "runuser": "runs with the rights of another user",
    "shutdown": "shuts the machine down",
    "reboot": "restarts the machine",
    "halt": "shuts the machine down",
    "poweroff": "shuts the machine down",
    "telinit": "changes what the machine runs",
    "init": "changes what the machine runs",
    "kexec": "starts another kernel",
    "killall5": "signals every process",
    "mount": "changes what is mounted",
    "umount": "changes what is mounted",
    "swapoff": "changes the machine's memory",
    "insmod": "loads code into the kernel",
    "modprobe": "loads code into the kernel",
    "rmmod": "removes code from the kernel",
    "mknod": "makes a device",
    "losetup": "makes a device",
    "fdisk": "changes partitions",
    "sfdisk": "changes partitions",
    "gdisk": "changes partitions",
    "sgdisk": "changes partitions",
    "parted": "changes partitions",
    "hdparm": "changes how a disk works",
    "cryptsetup": "changes encrypted disks",
    "nsenter": "enters another container or the host",
    "unshare": "makes namespaces of its own",
    "chroot": "runs in another root",
    "iptables": "changes network rules",
    "ip6tables": "changes network rules",
    "nft": "changes network rules",
    "ufw": "changes network rules",
    "visudo": "changes who may do what",
    "passwd": "changes a password",
    "chpasswd": "changes a password",
    "useradd": "changes users",
    "usermod": "changes users",
    "userdel": "changes users",
    "srm": "removes files beyond recovery",
}

FIND_REMOVERS = frozenset({"rm", "shred", "unlink", "rmdir"})
FIND_EXECUTES = frozenset({"-exec", "-execdir", "-ok", "-okdir"})
FIND_TESTS_WITH_VALUE = frozenset(
    [
        "-amin",
        "-anewer",
        "-atime",
        "-cmin",
        "-cnewer",
        "-context",
        "-ctime",
        "-files0-from",
        "-fls",
        "-fprint",
        "-fprint0",
        "-fstype",
        "-gid",
        "-group",
        "-ilname",
        "-iname",
        "-inum",
        "-ipath",
        "-iregex",
        "-iwholename",
        "-links",
        "-lname",
        "-maxdepth",
        "-mindepth",
        "-mmin",
        "-mtime",
        "-name",
        "-newer",
        "-path",
        "-perm",
        "-printf",
        "-regex",
        "-regextype",
        "-samefile",
        "-size",
        "-type",
        "-uid",
        "-used",
        "-user",
        "-wholename",
        "-xtype",
    ]
)
"""Tests of `find` that take a value."""

HOSTILE_FLAGS = frozenset({"+", ":"})
"""First characters that make a word dangerous, although it is not an option: `git push origin +main` forces, `git push
origin :main` removes.
"""

DANGEROUS_SUBCOMMANDS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], str], ...] = (
    ("git", ("push",), ("--force", "--force-with-lease", "-f", "--mirror", "+"), "overwrites what others pushed"),
    ("git", ("push",), ("--delete", "-d", "--prune", ":"), "removes branches or tags elsewhere"),
    ("git", ("reset",), ("--hard", "--merge"), "discards uncommitted work"),
    ("git", ("clean",), ("-f", "--force"), "removes files that git does not know"),
    ("git", ("branch",), ("-D",), "removes a branch that is not merged"),
    ("git", ("checkout",), ("-f", "--force"), "discards uncommitted work"),
    ("git", ("stash", "clear"), (), "discards stashed work"),
    ("git", ("reflog", "expire"), (), "removes what could be recovered"),
    ("git", ("gc",), ("--prune",), "removes what could be recovered"),
    ("git", ("update-ref",), ("-d",), "removes a branch or tag"),
    ("git", ("filter-branch",), (), "rewrites history"),
    ("git", ("filter-repo",), (), "rewrites history"),
    ("systemctl", ("poweroff",), (), "shuts the machine down"),
    ("systemctl", ("reboot",), (), "restarts the machine"),
    ("systemctl", ("halt",), (), "shuts the machine down"),
    ("systemctl", ("stop",), (), "stops a service"),
    ("systemctl", ("disable",), (), "stops a service"),
    ("systemctl", ("mask",), (), "stops a service"),
    ("sysctl", (), ("-w", "-p", "--write", "--load", "--system"), "changes the kernel's settings"),
    ("crontab", (), ("-r",), "removes all timed jobs"),
    (
        "rsync",
        (),
        ("--delete", "--delete-before", "--delete-after", "--delete-excluded", "--remove-source-files"),
        "removes files",
    ),
    ("npm", ("publish",), (), "publishes a package"),
    ("npm", ("unpublish",), (), "withdraws a package"),
    ("yarn", ("publish",), (), "publishes a package"),
    ("pnpm", ("publish",), (), "publishes a package"),
    ("cargo", ("publish",), (), "publishes a package"),
    ("cargo", ("yank",), (), "withdraws a package"),
    ("poetry", ("publish",), (), "publishes a package"),
    ("uv", ("publish",), (), "publishes a package"),
    ("twine", ("upload",), (), "publishes a package"),
    ("gem", ("push",), (), "publishes a package"),
    ("docker", ("push",), (), "publishes an image"),
    ("docker", ("prune",), (), "removes containers, images or volumes"),
    ("docker", ("volume", "rm"), (), "removes a volume"),
    ("docker", ("run",), ("--privileged",), "starts a container without isolation"),
    ("kubectl", ("delete",), (), "removes things from a cluster"),
    ("helm", ("uninstall",), (), "removes things from a cluster"),
    ("terraform", ("destroy",), (), "destroys infrastructure"),
    ("terraform", ("apply",), ("-auto-approve", "--auto-approve"), "changes infrastructure without a confirmation"),
    ("aws", ("s3", "rm"), ("--recursive",), "removes stored objects"),
    ("aws", ("s3", "rb"), (), "removes stored objects"),
    ("dropdb", (), (), "removes a database"),
    ("redis-cli", ("FLUSHALL",), (), "empties a database"),
    ("redis-cli", ("flushall",), (), "empties a database"),
    ("nc", (), ("-e", "-c"), "gives control of a program to every client that connects"),
    ("ncat", (), ("-e", "-c", "--exec", "--sh-exec"), "gives control of a program to every client that connects"),
)
"""Rows of: program; words that must occur in this order; flags of which one must occur (empty: any flags); reason."""
