#!/bin/sh
# Makes the toolkit in /opt/toolcrew: the guest's own Python, bash and ripgrep, and the programs that toolcrew runs in
# sandboxes (contract/own_programs.py). The toolkit needs nothing of the image in which it is mounted: the programs name
# their own loader, and their own libraries by RPATH. RPATH comes before an LD_LIBRARY_PATH of the image; RUNPATH would
# come after it.
#
# Runs in a Debian image with python3, ripgrep, bash-static, bzip2, xz-utils and patchelf.
set -eu
kit=/opt/toolcrew
version=$(python3 -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
mkdir -p "$kit/bin" "$kit/lib/$version"

# add_libraries FILE: copies the libraries that the file needs, and its loader.
add_libraries() {
    ldd "$1" | sed -n -e 's/.* => \(\/[^ ]*\) .*/\1/p' -e 's/^[[:space:]]*\(\/[^ ]*ld-linux[^ ]*\) .*/\1/p' |
        while read -r library; do
            [ -e "$kit/lib/$(basename "$library")" ] || cp -L "$library" "$kit/lib/"
        done
}

# add_program FILE NAME
add_program() {
    cp -L "$1" "$kit/bin/$2"
    add_libraries "$1"
    patchelf --set-interpreter "$kit/lib/$(basename "$(patchelf --print-interpreter "$1")")" "$kit/bin/$2"
    patchelf --force-rpath --set-rpath "$kit/lib" "$kit/bin/$2"
}

add_program "$(command -v python3)" python3
add_program "$(command -v rg)" rg
for program in tar find xargs grep gzip bzip2 xz env cat head chmod mkdir mkfifo mv readlink rm; do
    add_program "$(command -v "$program")" "$program"
done
cp -L "$(command -v bash-static)" "$kit/bin/bash"
for library in "$kit"/lib/*.so*; do
    case $library in
        */ld-linux* | */libc.so*) ;;
        *) patchelf --force-rpath --set-rpath "$kit/lib" "$library" ;;
    esac
done

# The guest uses no TLS, no database and no terminal. These parts would bring large libraries.
tar -C "/usr/lib/$version" -c \
    --exclude=__pycache__ --exclude=./sitecustomize.py --exclude='./_sysconfigdata*' --exclude=./test --exclude=./idlelib --exclude=./lib2to3 --exclude=./tkinter \
    --exclude=./ensurepip --exclude=./distutils --exclude=./pydoc_data --exclude=./unittest --exclude=./sqlite3 \
    --exclude=./curses --exclude=./dbm --exclude=./xml --exclude=./turtledemo --exclude='./config-*' \
    --exclude='./lib-dynload/_ssl*' --exclude='./lib-dynload/_hashlib*' --exclude='./lib-dynload/_sqlite3*' \
    --exclude='./lib-dynload/_curses*' --exclude='./lib-dynload/readline*' --exclude='./lib-dynload/_dbm*' \
    --exclude='./lib-dynload/_crypt*' --exclude='./lib-dynload/nis*' --exclude='./lib-dynload/_lsprof*' \
    --exclude='./lib-dynload/_bz2*' --exclude='./lib-dynload/_lzma*' \
    --exclude='./lib-dynload/_uuid*' --exclude='./lib-dynload/*test*' \
    . | tar -C "$kit/lib/$version" -x
for module in "$kit/lib/$version"/lib-dynload/*.so; do
    add_libraries "$module"
    patchelf --force-rpath --set-rpath "$kit/lib" "$module"
done
