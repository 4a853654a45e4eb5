# shellcheck shell=bash
# Sourced: Debian packages that the job needs from the system, and only those that are missing.
#
# Everything is asked by what it provides (a command, a library), not by package name: a Slurm or an MPI that came
# another way is used as it is, and nothing is installed beside it.

PATH=$PATH:/usr/sbin:/sbin # where daemons live, also for users whose PATH leaves it out

MISSING=() # packages to install

have() { command -v "$1" >/dev/null 2>&1; }

have_library() { ldconfig -p 2>/dev/null | grep -q "^[[:space:]]*$1 "; }

python_has() { have "$python" && "$python" -c "$1" 2>/dev/null; }

# Debian 12's Slurm loads PMIx by the name libpmix.so, which only the development package has; later ones by
# libpmix.so.2. A Slurm from elsewhere has no plugin there and is trusted to find its own.
slurm_finds_pmix() {
    local plugins=(/usr/lib/*/slurm-wlm/mpi_pmix_v*.so) named=(/usr/lib/*/libpmix.so)
    [ ! -e "${named[0]}" ] || return 0
    if [ -e "${plugins[0]}" ]; then
        grep -q 'libpmix\.so\.[0-9]' "${plugins[0]}"
    else
        have slurmd || ! grep -q '^VERSION_ID="12"' /etc/os-release
    fi
}

# need PACKAGE WHY
need() {
    MISSING+=("$1")
    NEEDED+="$(printf '    %-15s %s' "$1" "$2")"$'\n'
}

# find_missing_packages KIND: fill MISSING. KIND is "slurm" (all that a Slurm on this machine takes) or "site" (the
# site has a Slurm already: only Python and MPI are looked at).
find_missing_packages() {
    MISSING=()
    NEEDED=""
    local python=${PYTHON:-python3}
    have "$python" || need python3 "dynarl is written in it"
    # Debian ships Python in parts: without this one `python3 -m venv` cannot put pip into a new environment.
    python_has "import ensurepip, venv" || need python3-venv "virtual environments"
    # reasoning-gym, which makes the prompts, needs pycosat, and that is published as C source only.
    { have gcc && have ld; } || need gcc "pycosat (for reasoning-gym) is published as C source"
    [ -e /usr/include/stdlib.h ] || need libc6-dev "the same"
    python_has "import os, sysconfig; os.stat(sysconfig.get_path('include') + '/Python.h')" || need libpython3-dev "the same"
    have_library libmpi.so.40 || need openmpi-bin "Open MPI: moves state between nodes"
    [ "$1" = slurm ] || return 0
    have slurmctld || need slurmctld "Slurm's controller"
    have slurmd || need slurmd "Slurm's node daemon, one per node"
    { have srun && have sbatch && have scontrol; } || need slurm-client "srun, sbatch, squeue"
    have munged || need munge "Slurm's authentication"
    slurm_finds_pmix || need libpmix-dev "Slurm's PMIx plugin opens libpmix.so, the name this package has"
    have ip || need iproute2 "a network of its own for every node"
    { have unshare && have nsenter && have flock; } || need util-linux "namespaces for nodes"
    have mount || need mount "a /tmp of its own for every node"
}

# install_packages KIND: install what is missing. Without root, print the line to type and stop.
install_packages() {
    find_missing_packages "$1"
    [ ${#MISSING[@]} -gt 0 ] || return 0
    local line="apt-get install --no-install-recommends ${MISSING[*]}"
    say "Missing from this system:"
    printf '%s' "$NEEDED"
    if ! have apt-get; then
        die "there is no apt-get here to install them with. Debian 12 and 13 are what is tested; elsewhere install the like of: ${MISSING[*]}"
    fi
    if [ "$(id -u)" -ne 0 ]; then
        say ""
        say "Only root may install them. Type this and start again:"
        say "    sudo $line"
        exit 1
    fi
    step "apt-get update" apt-get update -q
    step "$line" apt_install "${MISSING[@]}"
}

# Debian starts and enables a daemon when its package is installed. Here the daemons are wanted as programs only, so
# for the time of the installation a policy-rc.d forbids just these to start, and those that came with it are disabled.
# A policy-rc.d that exists already is the site's own decision and stays in force untouched.
apt_install() {
    local policy=/usr/sbin/policy-rc.d unit
    if [ ! -e "$policy" ]; then
        # It ends with this process: left behind by a kill -9, it would permit everything.
        printf '#!/bin/sh\n# dynarl installs packages (process %d)\n%s\nexit 0\n' $$ \
            "case \$1 in munge*|slurm*) [ -d /proc/$$ ] && exit 101;; esac" >"$policy"
        chmod 755 "$policy"
        # shellcheck disable=SC2064  # the value now, not the value then
        trap "rm -f $policy" EXIT
    fi
    if ! have systemctl && ! have systemd-sysusers; then
        # Debian 13's Slurm depends on "systemd or systemd-standalone-sysusers" and apt takes the first: in a container
        # that would bring a whole init system.
        [ -z "$(apt-cache search --names-only '^systemd-standalone-sysusers$')" ] || set -- "$@" systemd-standalone-sysusers
    fi
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends -o DPkg::Lock::Timeout=120 "$@"
    for unit in "$@"; do
        case $unit in
        munge | slurmd | slurmctld)
            if have systemctl; then systemctl disable "$unit"; else update-rc.d "$unit" disable; fi || true ;;
        esac
    done
}
