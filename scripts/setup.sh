#!/bin/sh
# Everything a fresh machine needs, with no question asked: .venv, the package, a broker, the demo's data set.
#
# Run by `make setup`, `make demo` and `make test`. A second run takes a moment; it installs again when pyproject.toml
# or its lock changed. Settings, all optional:
#   PYTHON     interpreter to use, 3.10 to 3.14            (default: the first that fits)
#   EXTRA      cpu or cuda                                 (default: cuda where nvidia-smi works, else cpu)
#   LOCKED     0 installs what pyproject.toml's ranges allow (default: the versions and digests in scripts/locks)
#   SKIP_APT   1 leaves the system's packages alone        (default: apt is used where it needs no password)
set -eu

cd "$(dirname "$0")/.."
VENV=.venv
STAMP=$VENV/installed
APT_PACKAGES_SEEN=

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

fits() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1; }

find_python() {
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
        if fits "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.10 to 3.14 found; install one (Debian: apt install python3 python3-venv), or name it: PYTHON=/path/to/python3 make setup"
}

# Runs apt-get if that needs no password; otherwise, or if it fails, returns non-zero.
apt_install() {
    [ "${SKIP_APT:-0}" != 1 ] && command -v apt-get >/dev/null 2>&1 || return 1
    if [ "$(id -u)" = 0 ]; then
        as_root="env"
    elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
        as_root="sudo -n env"
    else
        return 1
    fi
    apt="$as_root DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120"
    if [ -z "$APT_PACKAGES_SEEN" ]; then
        $apt update </dev/null >/dev/null 2>&1 || true # with old lists the packages may still be there
        APT_PACKAGES_SEEN=1
    fi
    say "installing $1 with apt"
    $apt install -y --no-install-recommends "$1" </dev/null >/dev/null 2>&1
}

# Whether .venv's interpreter fits, and is of the version that was asked for, if one was.
venv_fits() {
    [ -x $VENV/bin/python ] && fits $VENV/bin/python || return 1
    [ -z "${PYTHON:-}" ] || [ "$("$PYTHON" --version 2>&1)" = "$($VENV/bin/python --version 2>&1)" ]
}

make_venv() {
    venv_fits && return
    python=$(find_python)
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then # Debian splits it off
        version=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        apt_install "$version" || fail "$python can't make virtual environments; install $version and try again"
    fi
    say "making $VENV with $("$python" --version)"
    "$python" -m venv --clear $VENV
}

choose_extra() {
    if [ -n "${EXTRA:-}" ]; then
        echo "$EXTRA"
    elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then
        echo cuda
    else
        echo cpu
    fi
}

# Every version with its digest, so that two newcomers get the same. Fails where the lock isn't for this platform, is
# older than pyproject.toml, or names a file that this machine's index doesn't have.
install_locked() {
    [ "${LOCKED:-1}" = 1 ] && [ "$(uname -s) $(uname -m)" = "Linux x86_64" ] || return 1
    $VENV/bin/python scripts/lock.py check || return 1
    $VENV/bin/python -m pip install -qq --disable-pip-version-check --no-input --no-deps --require-hashes -r "$1" </dev/null &&
        $VENV/bin/python -m pip install -qq --disable-pip-version-check --no-input --no-deps --no-build-isolation -e . </dev/null
}

install_package() {
    extra=$(choose_extra)
    lock=scripts/locks/$extra.txt
    wanted="$extra ${LOCKED:-1} $(cat pyproject.toml "$lock" 2>/dev/null | cksum)"
    [ -f $STAMP ] && [ "$(cat $STAMP)" = "$wanted" ] && return
    rm -f $STAMP
    say "installing replayfleet[$extra,dev]; PyTorch is large, this takes minutes the first time"
    if ! install_locked "$lock"; then
        say "not from $lock; installing what the ranges in pyproject.toml allow"
        # The pip that came with Python 3.11.7 finds no versions that fit each other; the newest does.
        $VENV/bin/python -m pip install -qq --disable-pip-version-check --no-input --upgrade pip </dev/null || true
        $VENV/bin/python -m pip install -qq --disable-pip-version-check --no-input -e ".[$extra,dev]" </dev/null ||
            fail "pip could not install replayfleet[$extra,dev], see its message above; the same command tries again"
    fi
    echo "$wanted" >$STAMP
}

has_mosquitto() {
    command -v mosquitto >/dev/null 2>&1 || [ -x /usr/sbin/mosquitto ] || [ -x /usr/local/sbin/mosquitto ] ||
        [ -x /opt/homebrew/sbin/mosquitto ]
}

get_broker() {
    has_mosquitto && return
    apt_install mosquitto && has_mosquitto && return
    say "no mosquitto and no way to install it without a password: using the embedded broker (slower, loopback only)"
}

has_fashion_mnist() {
    $VENV/bin/python -c 'from replayfleet.federation.streams.datasets import load_dataset; load_dataset("fashion-mnist")' 2>/dev/null
}

get_data() {
    has_fashion_mnist && return
    apt_install dataset-fashion-mnist && has_fashion_mnist && return
    say "no Debian package with Fashion-MNIST here: fetching it with torchvision (30 MB)"
    $VENV/bin/python - <<'PYTHON' || say "without Fashion-MNIST the demo can't run: put its four idx files into a folder and name it, REPLAYFLEET_DATA=/path make demo"
import sys
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.streams.datasets import load_dataset
try:
    load_dataset("fashion-mnist", download=True)
except SettingsError as error:
    sys.exit("setup: " + " ".join(str(error).split()))
PYTHON
}

if [ -f /etc/nv_tegra_release ]; then
    fail "this is a Jetson: OpenCV and ONNX Runtime come from JetPack or NVIDIA's index, not from here; docs/deploy.md says how to install"
fi
make_venv
install_package
get_broker
get_data
