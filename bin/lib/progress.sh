# shellcheck shell=bash
# Sourced by the commands in bin/: one line per step with the time it took, everything else into a log.
# The caller sets LOG, the file that takes what the steps print.

say() { printf '%s\n' "$*"; }

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# step TEXT COMMAND...: run a command quietly. If it fails, show its last lines and what to do, and exit.
step() {
    local text=$1 began=$SECONDS status=0 first_line
    shift
    printf '  %-58s' "$text"
    first_line=$(($(wc -l <"$LOG") + 1))
    printf '\n$ %s   (%s)\n' "$*" "$(date '+%F %T')" >>"$LOG"
    # Not `if "$@"`: bash ignores errexit inside whatever runs as a condition, so a step of several commands would
    # go on after its first failure.
    set +e
    (
        set -e
        "$@"
    ) >>"$LOG" 2>&1 </dev/null
    status=$?
    set -e
    if [ "$status" -eq 0 ]; then
        printf ' %4d s\n' $((SECONDS - began))
        return
    fi
    printf ' failed after %d s\n\n' $((SECONDS - began))
    tail -n "+$first_line" "$LOG" | tail -n 20 | sed 's/^/    | /' >&2
    advise "$(tail -n "+$first_line" "$LOG")" >&2
    exit "$status"
}

# advise OUTPUT: the next action, from what the failed command printed.
advise() {
    printf '\n'
    case $1 in
    *"No space left"*)
        say "The disk is full. About 4 GB are needed; DYNARL_VENV=DIR puts the virtual environment elsewhere." ;;
    *"Could not get lock"*)
        say "Another package manager is running; run this again when it has ended." ;;
    *"Temporary failure"* | *"Could not resolve"* | *"Name or service not known"* | *"Connection"* | *"timed out"*)
        say "A package server did not answer. Behind a proxy, set http_proxy and https_proxy (apt and pip read them)." ;;
    *"No matching distribution"*)
        say "pip found no such release for this Python ($(uname -m)). With a package mirror, check that it carries it." ;;
    esac
    say "The whole log: $LOG"
    say "Run the same command again once that is mended: what is done already is not done again."
}
