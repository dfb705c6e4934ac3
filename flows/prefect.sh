#!/bin/sh
# Prefect's server and one worker, which runs the deployments cram/full and cram/study: prefect.sh up | down
# Pid files and logs are in PREFECT_HOME (.prefect); PREFECT_API_URL chooses another address.
set -eu
cd "$(dirname "$0")/.."
mkdir -p "${PREFECT_HOME:=$PWD/.prefect}"
PREFECT_HOME=$(cd "$PREFECT_HOME" && pwd) # as Prefect hands it to its runs
no_proxy=${no_proxy:-${NO_PROXY:-}} # a proxy of the environment takes no request to this machine
case $no_proxy in
"*") ;;
*) no_proxy=${no_proxy:+$no_proxy,}127.0.0.1,localhost,::1 ;;
esac
NO_PROXY=$no_proxy
case ${PYTHONOPTIMIZE:-} in
"" | 0 | 1) ;;
*) export PYTHONOPTIMIZE=1 ;; # 2 takes docstrings away, which transformers reads
esac
export PREFECT_HOME no_proxy NO_PROXY

python=${CRAM_PYTHON:-.venv/bin/python}

prefect() { "$python" -m prefect --no-prompt "$@"; }

find_server() { # print its port and address; status 0: it runs, 3: it can be started, 1: it can't, as a sentence says
    "$python" -m flows.cli.server
}

is_running() { # of a process that `make up` started: whether it lives; a zombie has no command line
    [ -n "$1" ] && grep -qs prefect "/proc/$1/cmdline" &&
        tr '\0' '\n' 2>/dev/null <"/proc/$1/environ" | grep -qsxF "PREFECT_HOME=$PREFECT_HOME"
}

has_ended() { # looks twice: for a moment, a process that starts a program has neither command line nor environment
    ! is_running "$1" && sleep 1 && ! is_running "$1"
}

pid_of() { cat "$PREFECT_HOME/$1.pid" 2>/dev/null || true; }

start() { # NAME COMMAND...: in its own session, so that no terminal ends it
    name=$1
    shift
    setsid "$python" -m prefect --no-prompt "$@" >>"$PREFECT_HOME/$name.log" 2>&1 </dev/null &
    echo $! >"$PREFECT_HOME/$name.pid"
}

runs() { # the processes of flow runs; they outlive a killed worker
    for process in /proc/[0-9]*; do
        if tr '\0' ' ' 2>/dev/null <"$process/cmdline" | grep -qs "prefect.engine" &&
            tr '\0' '\n' 2>/dev/null <"$process/environ" | grep -qsxF "PREFECT_HOME=$PREFECT_HOME"; then
            echo "${process#/proc/}"
        fi
    done
}

end() { # SECONDS PID: ask a process to end; kill it if it is left after this time
    seconds=$1 pid=$2
    kill -TERM "$pid" 2>/dev/null || true
    while is_running "$pid" && [ "$seconds" -gt 0 ]; do
        sleep 1
        seconds=$((seconds - 1))
    done
    ! is_running "$pid" || kill -KILL "$pid" 2>/dev/null || true
}

up() {
    status=0
    found=$(find_server) || status=$?
    port=${found%% *}
    address=${found#* }
    case $status in
    0) ;;
    3)
        is_running "$(pid_of server)" ||
            PREFECT_API_URL=$address PREFECT_SERVER_API_PORT=$port start server server start
        tries=600
        until [ "$status" = 0 ]; do
            ! has_ended "$(pid_of server)" || { echo "The server ended:" >&2; tail "$PREFECT_HOME/server.log" >&2; exit 1; }
            [ "$tries" -gt 0 ] || { echo "The server does not answer. Run \`make down\`, then \`make up\`." >&2; exit 1; }
            tries=$((tries - 1))
            sleep 0.5
            status=0
            find_server >/dev/null || status=$?
            [ "$status" = 0 ] || [ "$status" = 3 ] || exit 1 # it asks for a login
        done
        ;;
    *) exit 1 ;;
    esac
    export PREFECT_API_URL="$address"
    echo "Server: running at $PREFECT_API_URL"
    prefect work-pool inspect local >/dev/null 2>&1 || prefect work-pool create local --type process >/dev/null
    prefect deploy --all >"$PREFECT_HOME/deploy.log" 2>&1 || { cat "$PREFECT_HOME/deploy.log" >&2; exit 1; }
    echo "Deployed: cram/full, cram/study"
    is_running "$(pid_of worker)" || start worker worker start --pool local --limit 1
    echo "Worker: running"
    echo
    echo "Now:  source .venv/bin/activate    (once in each terminal)"
    echo "      prefect deployment run cram/full -p recipe=demo --watch"
    echo "See:  ${PREFECT_API_URL%/api}"
    echo "Stop: make down"
}

down() {
    worker=$(pid_of worker)
    ! is_running "$worker" || kill -STOP "$worker" # so that it begins no other run; it would kill this one at once
    for run in $(runs); do
        end 120 "$run" # a run that trains writes its checkpoint first
        echo "Run: stopped"
    done
    if is_running "$worker"; then
        kill -KILL "$worker"
        echo "Worker: stopped"
    fi
    server=$(pid_of server)
    if is_running "$server"; then
        end 15 "$server"
        echo "Server: stopped"
    fi
    rm -f "$PREFECT_HOME/worker.pid"
    grep -qs prefect "/proc/${server:-none}/cmdline" || rm -f "$PREFECT_HOME/server.pid" # or it is of `prefect server start -b`
}

case ${1:-} in
up | down) "$1" ;;
*)
    echo "usage: $0 up | down" >&2
    exit 2
    ;;
esac
