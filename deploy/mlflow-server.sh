#!/usr/bin/env bash
# MLflow for a team: a PostgreSQL and an `mlflow server` of their own in one folder.
#
#   deploy/mlflow-server.sh start FOLDER [--port 5000] [--workers 2] [-- more flags of `mlflow server`]
#   deploy/mlflow-server.sh stop FOLDER
#   deploy/mlflow-server.sh status FOLDER
#
# Runs as the user who calls it, who must not be root: PostgreSQL refuses that. Nothing listens outside this machine: the
# database has no TCP port at all, only a socket in FOLDER, and lets in nobody but this user (peer); MLflow is bound to
# 127.0.0.1. To open it to others: `-- --host 0.0.0.0 --allowed-hosts NAME:PORT`, behind a proxy with TLS and a login, or
# with `--app-name basic-auth`. Data survive stop, start and a crash of the machine: FOLDER/postgres and FOLDER/artifacts.
#
# Needs: PostgreSQL's server (Debian: apt-get install postgresql) and Python packages (pip install 'bishop-ray[server]').
# PYTHON names the Python to use: by default the .venv beside this folder, else python3.
set -euo pipefail
umask 077

die() { echo "error: $*" >&2; exit 2; }
usage() { sed -n '4,6s/^# *//p' "$0" >&2; exit 2; }

[[ $# -ge 2 ]] || usage
action=$1 folder=$2
shift 2
port=5000 workers=2
while [[ $# -gt 0 ]]; do
  case $1 in
    --port | --workers)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || die "$1: expected a number; found '${2:-}'"
      if [[ $1 == --port ]]; then port=$2; else workers=$2; fi
      shift 2 ;;
    --) shift; break ;;
    *) die "expected --port, --workers or --; found '$1'" ;;
  esac
done

[[ $(id -u) != 0 ]] || die "root cannot run PostgreSQL; call this as another user, e.g. runuser -u postgres -- $0 ..."
if [[ $action == start ]]; then mkdir -p "$folder" || exit 2; fi
[[ -d $folder ]] || die "FOLDER: expected a folder that 'start' has made; found '$folder'"
folder=$(cd "$folder" && pwd)
data=$folder/postgres socket=$folder/socket log=$folder/log pidfile=$folder/mlflow.pid
# A socket's address has room for 107 bytes.
[[ ${#socket} -le 90 ]] || die "FOLDER: expected a path of at most 83 characters; found one of ${#folder}"

beside=$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python
python=${PYTHON:-$([[ -x $beside ]] && echo "$beside" || echo python3)}

# Debian keeps the server's programs out of PATH.
postgres_bin() {
  local found
  found=$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -t/ -k5 -n | tail -1)
  [[ -n $found ]] || found=$(dirname "$(command -v initdb || echo /nowhere/initdb)")
  [[ -x $found/initdb ]] || die "PostgreSQL's server is missing: apt-get install postgresql"
  echo "$found"
}

# The process in the pid file, if it is still ours: numbers are used again.
mlflow_pid() {
  local pid
  pid=$(cat "$pidfile" 2>/dev/null) || return 1
  [[ -n $pid ]] && tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -q "mlflow server" || return 1
  echo "$pid"
}

stop_mlflow() {
  local pid
  pid=$(mlflow_pid) || return 0
  kill -TERM -- "-$pid" 2>/dev/null || true  # its own session: the server and its workers
  for _ in $(seq 100); do
    mlflow_pid >/dev/null || break
    sleep 0.1
  done
  kill -KILL -- "-$pid" 2>/dev/null || true
  rm -f "$pidfile"
}

stop_postgres() {
  if "$bin/pg_ctl" status -D "$data" >/dev/null 2>&1; then
    "$bin/pg_ctl" stop -D "$data" -m fast -w -t 60 >>"$log/postgres.log"
  fi
}

start_postgres() {
  if [[ ! -f $data/PG_VERSION ]]; then
    rm -rf "$data.new"  # an initdb that was interrupted
    "$bin/initdb" -D "$data.new" --encoding=UTF8 --locale=C.UTF-8 --data-checksums \
      --auth-local=peer --auth-host=reject >"$log/initdb.log" 2>&1 || { tail -5 "$log/initdb.log" >&2; exit 2; }
    printf '%s\n' "listen_addresses = ''" "unix_socket_directories = '$socket'" "unix_socket_permissions = 0700" \
      >>"$data.new/postgresql.conf"
    mv "$data.new" "$data"
  fi
  if ! "$bin/pg_ctl" status -D "$data" >/dev/null 2>&1; then
    "$bin/pg_ctl" start -D "$data" -w -t 60 -l "$log/postgres.log" >/dev/null 9>&- ||
      { tail -5 "$log/postgres.log" >&2; die "PostgreSQL does not start, see $log/postgres.log"; }
  fi
  [[ $("$bin/psql" -h "$socket" -d postgres -XAtc "SELECT 1 FROM pg_database WHERE datname = 'mlflow'") == 1 ]] ||
    "$bin/createdb" -h "$socket" mlflow
}

start_mlflow() {
  local store
  store=$("$python" -c 'import sys; from urllib.parse import quote
print(f"postgresql+psycopg://{quote(sys.argv[1])}@/mlflow?host={quote(sys.argv[2], safe=str())}")' "$(id -un)" "$socket")
  # Without the runners of MLflow's own background jobs: 13 processes and 2 GB that tracking does not need.
  MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false MLFLOW_DISABLE_TELEMETRY=true setsid "$python" -m mlflow server \
    --host 127.0.0.1 --port "$port" --workers "$workers" --backend-store-uri "$store" \
    --artifacts-destination "$folder/artifacts" "$@" >>"$log/mlflow.log" 2>&1 </dev/null 9>&- &
  local pid=$!
  echo "$pid" >"$pidfile"
  "$python" - "$pid" "http://127.0.0.1:$port/health" <<'PYTHON' || return 1
import os, sys, time, urllib.request
pid, url, ends = int(sys.argv[1]), sys.argv[2], time.monotonic() + 180
while time.monotonic() < ends:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "Z":
                break
        with urllib.request.urlopen(url, timeout=2) as answer:
            sys.exit(answer.status != 200)
    except ProcessLookupError:
        break
    except OSError:
        time.sleep(0.2)
sys.exit(1)
PYTHON
  echo "$port" >"$folder/port"
}

bin=$(postgres_bin)
case $action in
  start)
    "$python" -c '' 2>/dev/null || die "PYTHON: expected a Python that $(id -un) can run; found '$python'"
    for module in mlflow psycopg; do
      "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$module') is None)" ||
        die "$python has no package '$module': pip install 'bishop-ray[server]'"
    done
    mkdir -p "$log" "$folder/artifacts" && mkdir -p -m 0700 "$socket"
    exec 9>"$folder/lock"
    flock -n 9 || die "$folder: another start is at work"
    if mlflow_pid >/dev/null && "$bin/pg_ctl" status -D "$data" >/dev/null 2>&1; then
      echo "running: http://127.0.0.1:$(cat "$folder/port")"
      exit 0
    fi
    stop_mlflow
    if ! "$python" -c "import socket, sys; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(('127.0.0.1', int(sys.argv[1])))" "$port" 2>/dev/null; then
      die "--port: expected a free port; $port is taken"
    fi
    start_postgres
    if ! start_mlflow "$@"; then
      tail -5 "$log/mlflow.log" >&2
      stop_mlflow
      stop_postgres
      die "mlflow server does not start, see $log/mlflow.log"
    fi
    echo "started: http://127.0.0.1:$port (export MLFLOW_TRACKING_URI=http://127.0.0.1:$port)" ;;
  stop)
    stop_mlflow
    stop_postgres
    echo "stopped" ;;
  status)
    if pid=$(mlflow_pid) && "$bin/pg_ctl" status -D "$data" >/dev/null 2>&1; then
      echo "running: http://127.0.0.1:$(cat "$folder/port") (process $pid)"
    else
      echo "not running"
      exit 1
    fi ;;
  *) usage ;;
esac
