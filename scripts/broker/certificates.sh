#!/bin/sh
# Certificates for a fleet's broker and for everybody who talks to it, with openssl alone.
#
#   certificates.sh FOLDER broker HOST [HOST...]   ca.pem (made once), broker.pem, broker.key; names or IP addresses
#   certificates.sh FOLDER client ID [ID...]       ID.pem, ID.key; ID is the client id, or "aggregator", or "operator"
#
# Keep FOLDER, above all ca.key, on a machine that is neither the broker nor a device. Existing files are not replaced.
# DAYS=825 changes how long new certificates are valid; the CA's is 3650 days.
set -eu
umask 077

fail() {
    printf 'certificates: %s\n' "$*" >&2
    exit 2
}

new_key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1"; }

make_ca() {
    [ -f ca.pem ] && [ -f ca.key ] && return
    [ ! -e ca.pem ] && [ ! -e ca.key ] || fail "only one of ca.pem and ca.key is here; nothing was written"
    new_key ca.key
    cat >.config <<'CONFIG' # all that Python 3.13 asks of a CA; openssl's own defaults differ from system to system
[req]
distinguished_name = name
x509_extensions = authority
[name]
[authority]
basicConstraints = critical,CA:TRUE
keyUsage = critical,keyCertSign,cRLSign
subjectKeyIdentifier = hash
CONFIG
    openssl req -x509 -new -config .config -key ca.key -sha256 -days 3650 -subj "/CN=Replayfleet CA" -out ca.pem
    rm -f .config
    chmod 644 ca.pem
}

# name, common name, extensions
sign() {
    [ ! -e "$1.pem" ] && [ ! -e "$1.key" ] || fail "$1.pem or $1.key exists; move it away to make a new one"
    new_key "$1.key"
    cat >.extensions <<EXTENSIONS
basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
$3
EXTENSIONS
    openssl req -new -key "$1.key" -subj "/CN=$2" -out .request
    openssl x509 -req -in .request -CA ca.pem -CAkey ca.key -set_serial "0x$(openssl rand -hex 16)" -sha256 \
        -days "${DAYS:-825}" -extfile .extensions -out "$1.pem" 2>/dev/null
    rm -f .request .extensions
    chmod 644 "$1.pem"
    printf 'certificates: %s/%s.pem, %s.key\n' "$PWD" "$1" "$1"
}

names_of_hosts() {
    names=
    for host; do
        case $host in
        *[!A-Za-z0-9.:_-]* | '') fail "host '$host' is neither a name nor an address" ;;
        *:* | *[0-9].*[0-9].*[0-9].[0-9]*) kind=IP ;;
        *) kind=DNS ;;
        esac
        names=$names${names:+,}$kind:$host
    done
}

[ $# -ge 3 ] || fail "expected FOLDER broker HOST... or FOLDER client ID..."
mkdir -p "$1"
cd "$1"
what=$2
shift 2
case $what in
broker)
    names_of_hosts "$@"
    make_ca
    sign broker "$1" "subjectAltName=$names
extendedKeyUsage=serverAuth"
    ;;
client)
    for id; do # the id becomes a level of topics and of the broker's access rules
        case $id in
        *[!A-Za-z0-9_-]* | '') fail "id '$id' has characters other than A-Z a-z 0-9 _ -; nothing was written" ;;
        broker | ca) fail "id '$id' is taken" ;;
        esac
        [ ${#id} -le 64 ] || fail "id '$id' is longer than 64 characters"
    done
    make_ca
    for id; do sign "$id" "$id" "extendedKeyUsage=clientAuth"; done
    ;;
*) fail "'$what' is unknown; expected broker or client" ;;
esac
