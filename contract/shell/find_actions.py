"""What the actions of a `find` command do."""

_REMOVERS = frozenset({"rm", "shred", "unlink", "rmdir"})
_EXECUTES = frozenset({"-exec", "-execdir", "-ok", "-okdir"})
_TESTS_WITH_VALUE = frozenset(
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


def removes_what_it_finds(argv: tuple[str, ...]) -> bool:
    """Whether an action of this `find` removes. A word that belongs to a test, such as `rm` of `-name rm`, is no action."""
    at = 1
    while at < len(argv):
        word = argv[at]
        if word == "-delete":
            return True
        if word in _EXECUTES:
            end = next((i for i in range(at + 1, len(argv)) if argv[i] == ";" or argv[i - 1 : i + 1] == ("{}", "+")), len(argv))
            if any(part.rpartition("/")[2] in _REMOVERS for part in argv[at + 1 : end]):
                return True
            at = end
        elif word in _TESTS_WITH_VALUE or word.startswith("-newer"):
            at += 1
        elif word == "-fprintf":
            at += 2
        at += 1
    return False
