# shellcheck shell=bash
# Sourced by bin/quickstart and bin/test. `install_all KIND` brings in whatever is missing, and only that; KIND is as in
# debian.sh. The caller sets TOP, the checkout. Python is then $VENV/bin/python.

CACHE=$TOP/.cache
LOG=$CACHE/install.log

# shellcheck source=bin/lib/progress.sh
. "$TOP/bin/lib/progress.sh"
# shellcheck source=bin/lib/debian.sh
. "$TOP/bin/lib/debian.sh"
# shellcheck source=bin/lib/python.sh
. "$TOP/bin/lib/python.sh"

install_all() {
    mkdir -p "$CACHE"
    : >>"$LOG"
    install_packages "$1"
    # Two at a time would write into the same environment. The lock's descriptor must not reach the daemons started
    # later, which would hold it for as long as they live: hence the subshell.
    (
        flock --nonblock 9 || {
            say "Another installation is at work in $VENV; waiting for it"
            flock 9
        }
        install_venv
    ) 9>"$CACHE/install.lock"
}

# become COMMAND...: end as COMMAND, which then gets signals itself. Not as the first process of a container: that one has
# to collect orphans, which a shell does and Python does not, and workers take a parent with the id 1 for a dead one.
become() {
    [ $$ -ne 1 ] || { "$@"; exit; }
    exec "$@"
}
