#!/bin/sh
# Builds the image on Debian or Ubuntu without a Docker engine, as root: mmdebstrap builds the base image, buildah ours.
# Needs `apt-get install buildah crun mmdebstrap`; docker/run-without-docker.py then serves it.
# Images are in $CELLAR_IMAGES. The build gets the settings of pip on this machine, as a secret.
# ARCH=arm64 builds localhost/cellar-arm64, under emulation: also needs `qemu-user-static binfmt-support`.
set -eu
cd "$(dirname "$0")/.."
store=${CELLAR_IMAGES:-${XDG_CACHE_HOME:-$HOME/.cache}/cellar-containers}
python=${PYTHON:-python3}
own_arch=$(dpkg --print-architecture)
arch=${ARCH:-$own_arch}
mkdir -p "$store/tmp"
export TMPDIR="$store/tmp"

# vfs copies the whole image at every step, but works where overlay does not, as inside a container.
driver=overlay
command buildah --root "$store/overlay" --runroot "$store/run" --storage-driver overlay info >/dev/null 2>&1 || driver=vfs
echo "$driver" >"$store/driver"
buildah() {
    command buildah --root "$store/$driver" --runroot "$store/run" --storage-driver "$driver" "$@"
}

# The name of an image for an architecture.
image() {
    if [ "$2" = "$own_arch" ]; then echo "localhost/$1"; else echo "localhost/$1-$2"; fi
}

for some in "$own_arch" "$arch"; do
    base=$(image cellar-base "$some")
    if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
        mmdebstrap --variant=minbase --arch="$some" --include=python3,python3-venv bookworm "$store/base.tar"
        container=$(buildah from --arch "$some" scratch)
        buildah add --quiet "$container" "$store/base.tar" / >/dev/null
        buildah commit --quiet --rm "$container" "$base" >/dev/null
        rm "$store/base.tar"
    fi
done

pip_conf=$(mktemp)
trap 'rm -f "$pip_conf"' EXIT
{
    echo "[global]"
    # global.find-links='/a\n/b'  ->  find-links = /a /b; the first of two equal keys wins, as in pip
    "$python" -m pip config list | sed -n "s/\\\\n/ /g; s/^[^.]*\.\([a-z-]*\)='\(.*\)'\$/\1 = \2/p" | awk '!seen[$1]++'
} >"$pip_conf"

# Local folders and files of these settings are mounted under /tmp/pip, so that no path of this machine enters the image.
set --
for word in $(sed 's/^[a-z-]* = //' "$pip_conf"); do
    case $word in
        file://*) place=$(dirname "${word#file://}") name=$(basename "$word") ;; # an index: its files lie beside it
        /*) place=$word name= ;;
        *) continue ;;
    esac
    [ -e "$place" ] || continue
    inside=/tmp/pip/$#
    set -- "$@" "--volume=$place:$inside:ro"
    [ -z "$name" ] || inside=file://$inside/$name
    # The file may hold a password: written in place, it keeps its mode.
    changed=$(awk -v old="$word" -v new="$inside" '{ for (i = 3; i <= NF; i++) if ($i == old) $i = new } 1' "$pip_conf")
    echo "$changed" >"$pip_conf"
done
if [ -n "${TORCH_BACKEND+set}" ]; then
    set -- "$@" --build-arg "TORCH_BACKEND=$TORCH_BACKEND"
elif grep -q -e '^find-links' -e 'index-url' "$pip_conf"; then
    set -- "$@" --build-arg TORCH_BACKEND=
fi

buildah build --target runtime --isolation chroot --pull-never --layers=false --format docker --file docker/Dockerfile \
    --platform "linux/$arch" --build-arg "BUILDPLATFORM=linux/$own_arch" \
    --build-arg "BASE=$base" --build-arg "BUILD_BASE=$(image cellar-base "$own_arch")" \
    --secret "id=pip,src=$pip_conf" "$@" --tag "$(image cellar "$arch")" .

[ "$arch" = "$own_arch" ] || exit 0
# run-without-docker.py needs the image unpacked; all runs share one copy, because it is read-only.
buildah rm cellar >/dev/null 2>&1 || true
buildah rmi --prune >/dev/null # the image before this one
buildah from --pull-never --name cellar localhost/cellar
