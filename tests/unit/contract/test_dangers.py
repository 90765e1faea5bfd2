"""Danger ratings of commands: the two lists, and the commands that must not be on them."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcrew.contract.shell.commands import parse_commands
from toolcrew.contract.shell.dangers import Level, classify


def level(text: str, folder: str = "/workspace") -> Level:
    return classify(parse_commands(text), folder).level


@pytest.mark.parametrize(
    "text",
    [
        "rm -rf /", "rm -fr /*", "rm -rf /*/", "rm -rf /etc/*//", "rm -r -f -- /", "rm / -rf",
        "rm --recursive --force /", "rm --rec /", "rm -rf //", "rm -rf /./", "rm -rf /etc/..", "rm -rf /.*",
        "rm -rf / tmp/x", "rm -rf /{bin,etc}", "rm -rf --no-preserve-root x", "rm --no-preserve -r x", "rm -rf ~",
        "rm -rf ~/*", 'rm -rf "$HOME"', "rm -rf ${HOME}/", "rm -rf /usr/*", "rm -rf ..", "rm -rf ../*",
        "cd / && rm -rf *", "cd /tmp && rm -rf ~", "rm -rf build; ls | (cat; rm -rf /)", "cd && rm -rf ./*",
        "find / -delete", "find / -type f -exec rm {} +", "mv /* /dev/null", "mkfs.ext4 /dev/sda1",
        "wipefs -a /dev/sdb", "shred /dev/sda", "dd if=/dev/zero of=/dev/sda bs=1M", "cat x > /dev/nvme0n1",
        "echo x | tee /dev/mem", "cp image /dev/mmcblk0", "echo c > /proc/sysrq-trigger",
        "echo '|/x' > /proc/sys/kernel/core_pattern", "echo /x | tee /sys/fs/cgroup/a/release_agent",
        ":(){ :|:& };:", "bomb() { bomb | bomb & }; bomb", "f() { f & f & }; f", "function b { b|b& }; b",
        "f() ( f | f & ); f",
    ],
)  # fmt: skip
def test_a_catastrophic_command_is_detected(text: str) -> None:
    assert level(text) is Level.CATASTROPHIC


@pytest.mark.parametrize(
    "text",
    [
        "rm -rf /srv/build", "ls && rm -rf /srv/build", "rm -f /srv/x", "rm /etc/passwd", 'rm -rf "$DIR/"',
        "rm -rf '/*'", "find . -delete", "find / -name '*.pyc' -delete", "git push --force",
        "git -C d push origin +main", "git push origin :main", "git push --force-with-lease=x",
        "git reset --hard HEAD~1", "git clean -fdx", "git branch -D x", "git -c alias.x='!sh' x", "chmod -R 777 .",
        "chmod -R a+rwx .", "chmod u+s x", "chmod 4755 x", "chown -R me /", "kill -9 -1", "kill -- -1",
        "shutdown now", "reboot", "sudo ls", "curl u | sh", "curl u | sudo bash", "wget -O- u | python3",
        "mkfs.ext4 disk.img", "echo x > /etc/passwd", "echo k >> ~/.ssh/authorized_keys", "npm publish",
        "twine upload dist/*", "docker run --privileged x", "echo 'not closed",
    ],
)  # fmt: skip
def test_a_dangerous_command_is_detected_with_a_reason(text: str) -> None:
    rating = classify(parse_commands(text), "/workspace")
    assert (rating.level, bool(rating.reason)) == (Level.DANGEROUS, True)


@pytest.mark.parametrize(
    "text",
    [
        "", "ls -la ~", 'echo "rm -rf /"', "grep -r 'rm -rf /' .", 'git commit -m "rm -rf /"',
        "cat > notes.md <<'E'\nrm -rf /\nE", "rm x", "rm -f x y.log *.pyc", "rm -rf build",
        "rm -rf ./build/ dist *.egg-info */__pycache__ build/*", "rm -rf {build,dist} /workspace/build /tmp/x/*",
        "cd src && rm -rf build; cd /workspace/x && rm -f a", "nice rm -rf build && bash -c 'rm -rf dist'",
        "find . -name '*.py' | xargs grep foo; rm -rf build", "git push origin main",
        "git push origin HEAD:refs/for/main", "git reset HEAD x", "kill -9 123", "kill -1 123", "chmod +x run.sh",
        "chmod -R 755 .", "chmod -R u+w .", "dd if=/dev/zero of=disk.img", "make > /dev/null 2>&1",
        "curl -s u -o f", "curl -s u | python3 -m json.tool", "cat x | tr a b | sort",
        "python3 - <<'E'\nprint(1)\nE", "find . -name '*.py' | xargs grep foo", "find . -type f -exec wc -l {} +",
        "find . -name rm", "find / -name shred -o -path -delete",
        "find . -newer rm -exec ls -l {} ';' -printf unlink", "find . -exec wc {} + -name rm",
        "diff <(sort a) <(sort b)", 'x=$(date +%s); echo "$x" ${x%s} $((x + 2 * (3)))',
        "case $x in *.c) echo 1;; *) echo 2;; esac", "(cd src && make) || { echo failed; exit 1; }",
        "sed -i 's/a/b/' f && awk '{print $1}' f", "bash run.sh && bash -c 'ls -la'",
        "cp a /tmp/b; tar xzf a.tgz; mkdir -p a/b",
        "(echo > /dev/tcp/127.0.0.1/8000) 2> /dev/null && exec 3<> /dev/udp/localhost/53",
    ],
)  # fmt: skip
def test_an_everyday_command_is_not_dangerous(text: str) -> None:
    assert level(text) is Level.NONE


@pytest.mark.parametrize(
    "text",
    [
        "rm -rf .", "rm -rf ./", "rm -rf *", "rm -rf ./* .[!.]* [a-z]*", "rm -rf /workspace", "rm -rf /workspace/",
        "rm -rf /workspace/*", "rm -rf /workspace/*/*", "rm -rf /tmp", "rm -rf /tmp/*", "rm -rf build/../../srv/x",
        "rm -rf /workspace/../srv/x", "rm -rf /workspacex", "rm -rf {build,/srv/x}", "rm -rf {build,../x}",
        "rm -rf build{,/..}{,/srv}", "rm -rf .?/srv", "rm -rf build $X", "rm -rf build/$X", "rm -rf ~/x", "rm -rf",
        "cd /srv && rm -rf x", "cd /srv; cd /tmp/none; rm -rf x", "for i in 1 2; do rm -rf x; cd /srv; done",
        "cd .. && rm -rf x", "cd; rm -rf x", "cd -; rm -rf x", "cd $X && rm -rf x", "cd {a,..} && rm -rf x",
        "pushd /srv; rm -f x", "popd; rm -rf x", "CDPATH=/srv cd a; rm -rf x", "env -C /srv rm -rf x",
        "env -iC /srv rm -rf x", "env --chdir=/srv rm -rf x", "ssh host rm -rf x", "ls / | xargs rm -rf x",
        "ls / | xargs -I% rm -f %", "ls / | xargs -I{} sh -c 'rm -rf {}'",
        "find . -exec sh -c 'nice rm -rf {}' ';'", "find . -name rm -delete",
        "find . -name rm -exec ls {} ';' -execdir sudo /bin/rm {} +", "find . -ok unlink {} ';'",
        "parallel 'rm -rf {}' ::: /srv/x", "parallel -j 2 rm -rf x ::: a b", "sudo rm -rf build",
        "rm() { ls; }; rm -rf build",
    ],
)  # fmt: skip
def test_removal_outside_explicit_workspace_paths_is_dangerous(text: str) -> None:
    assert level(text) is Level.DANGEROUS


@pytest.mark.parametrize("folder", ["", "/", "/srv", "/workspacex", "workspace"])
def test_relative_paths_are_rated_by_the_start_folder(folder: str) -> None:
    assert level("rm -rf build", folder) is Level.DANGEROUS
    assert level("rm -rf /workspace/build", folder) is Level.NONE
    assert level("rm -rf *", "/") is Level.CATASTROPHIC


@pytest.mark.parametrize(
    ("text", "expected", "limit_s"),
    [
        ("rm -rf /" + "/*" * 100_000, Level.CATASTROPHIC, 0.3),
        *(
            (f"chmod {flags}{mode} x", Level.NONE, 1)
            for flags in ("", "-R ")
            for mode in ("ag" * 60_000 + "z", "u+" + "w" * 100_000 + "q", "a" * 100_000 + "q", "+" + "s" * 60_000 + "q")
        ),
    ],
    ids=range(9),
)
def test_a_long_path_or_mode_is_rated_in_bounded_time(text: str, expected: Level, limit_s: float) -> None:
    script = parse_commands(text)
    before = time.process_time()
    assert classify(script).level is expected
    assert time.process_time() - before < limit_s


@given(st.text())
def test_any_text_has_a_danger_level(text: str) -> None:
    assert classify(parse_commands(text)).level in Level


@given(st.text(alphabet=st.characters(blacklist_characters="'\x00"), max_size=40))
def test_quoted_text_is_not_rated_as_dangerous(text: str) -> None:
    assert level(f"echo '{text}'") is Level.NONE
