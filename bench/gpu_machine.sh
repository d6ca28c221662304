#!/usr/bin/env bash
# Everything that is measured on a GPU machine, also on one without a network: Python 3.12 with torch and numpy, CUDA's
# compiler and a system compiler are all that it must have.
#
#   bench/gpu_machine.sh pack FOLDER        here: packages, build tools and llama.cpp's source, in one archive
#   bench/gpu_machine.sh unpack FOLDER      there: unpack it, and check that Modelyard starts
#   bench/gpu_machine.sh build              llama.cpp with CUDA, llama-server and the benchmarks, by `setup --build`
#   bench/gpu_machine.sh models             a random model of 8 billion weights in Q8_0
#   bench/gpu_machine.sh train [MINUTES]    a small model with an MTP layer, on the GPU
#   bench/gpu_machine.sh background STEP    a step that goes on when the command has returned; `wait STEP SECONDS` for it
#   bench/gpu_machine.sh streams|tools|scale|mtp|mtp_cpu|threads
#                                           the measurements; each writes its results to $OUT
#
# WORK is where files are put (/tmp/modelyard-gpu), OUT where results are ($WORK/out).
set -uo pipefail
cd "$(dirname "$0")/.."
WORK=${WORK:-/tmp/modelyard-gpu}
OUT=${OUT:-$WORK/out}
mkdir -p "$WORK" "$OUT"
PYTHON=${PYTHON:-python3}
RELEASE=0.3.36
export XDG_CACHE_HOME=$WORK/cache XDG_DATA_HOME=$WORK/data XDG_CONFIG_HOME=$WORK/config PYTHONUNBUFFERED=1
export PYTHONPATH=$WORK/site:$PWD:$PWD/plugins PYTHONDONTWRITEBYTECODE=1
export PIP_NO_INDEX=1 PIP_FIND_LINKS=$WORK/wheels PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
LIBRARY=$XDG_CACHE_HOME/modelyard/llama_cpp/build-$RELEASE
MODEL=$WORK/8b.gguf
TRAINED=$WORK/mtp.gguf

pack() { # FOLDER: run it where there is a network
  unset PIP_NO_INDEX PIP_FIND_LINKS PYTHONPATH
  local folder=$1 platforms="" minor
  for minor in $(seq 5 39); do platforms+=" --platform manylinux_2_${minor}_x86_64"; done
  local pip="$PYTHON -m pip download -q --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none
    $platforms --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64 --only-binary=:all:"
  rm -rf "$folder/stage" && mkdir -p "$folder/stage/site" "$folder/stage/wheels" "$folder/stage/packages"
  "$PYTHON" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
    >"$folder/requirements.txt"
  printf 'gguf>=0.19,<1\npip\n' >>"$folder/requirements.txt"
  $pip -d "$folder/stage/packages" -r "$folder/requirements.txt" || return 1
  rm -f "$folder/stage/packages"/numpy-*  # torch's own is there
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --python-version 3.12 --only-binary=:all: \
    --target "$folder/stage/site" "$folder/stage/packages"/*.whl || return 1
  rm -rf "$folder/stage/packages" "$folder/stage/site/bin"
  find "$folder/stage/site" -name '*.so' -exec strip --strip-unneeded {} + 2>/dev/null
  $pip -d "$folder/stage/wheels" 'scikit-build-core>=0.9.2' 'cmake>=4,<5' 'ninja>=1.13,<2' || return 1
  (cd "$folder" && "$PYTHON" -m pip download -q --no-deps --no-binary :all: --no-build-isolation "llama-cpp-python==$RELEASE"
    tar xzf "llama_cpp_python-$RELEASE.tar.gz" -C stage) || return 1
  local vendor=$folder/stage/llama_cpp_python-$RELEASE/vendor/llama.cpp
  rm -rf "$folder/stage/llama_cpp_python-$RELEASE"/{.git,docs,examples,tests} "$vendor"/{docs,media,benches,examples,tests}
  rm -rf "$vendor"/models/templates "$vendor"/tools/ui/{src,tests,static}
  find "$vendor/models" -name '*.gguf' ! -name ggml-vocab-llama-bpe.gguf -delete
  tar c -C "$folder/stage" site wheels "llama_cpp_python-$RELEASE" | xz -6 -T0 >"$folder/gpu_machine.tar.xz"
  ls -l "$folder/gpu_machine.tar.xz"
}

unpack() { # FOLDER with the archive
  tar xJf "$1/gpu_machine.tar.xz" -C "$WORK" || return 1
  tar cz -C "$WORK" --mode=u+rw "llama_cpp_python-$RELEASE" | cat >"$WORK/wheels/llama_cpp_python-$RELEASE.tar.gz"
  local info=$WORK/site/modelyard-0.0.0.dist-info  # the plug-ins' entry points
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: modelyard\nVersion: 0.0.0\n' >"$info/METADATA"
  "$PYTHON" - >"$info/entry_points.txt" <<'PY'
import tomllib
for group, points in tomllib.load(open("pyproject.toml", "rb"))["project"]["entry-points"].items():
    print(f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), sep="\n")
PY
  "$PYTHON" -m modelyard --version && "$PYTHON" -m modelyard bench --help >/dev/null && echo "modelyard starts"
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  nvcc --version | tail -2
  "$PYTHON" --version
  nproc
}

build() { # BUILD_FLAGS: those of the GPU
  local flags=${BUILD_FLAGS:--DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90}
  flags+=" -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_TOOLS_INSTALL=ON -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF"
  flags+=" -DCMAKE_INSTALL_BINDIR=llama_cpp/lib -DCMAKE_INSTALL_LIBDIR=llama_cpp/lib"
  # Not the CC and CXX of the environment: in an image of torch they may link libstdc++ statically, and such a library
  # ends a process that has another libstdc++ when it reads a vocabulary.
  export CC=${HOST_CC:-/usr/bin/gcc} CXX=${HOST_CXX:-/usr/bin/g++} CUDAHOSTCXX=${HOST_CXX:-/usr/bin/g++}
  CMAKE_ARGS=$flags "$PYTHON" -m modelyard setup --build || return 1
  ls "$LIBRARY" | tr '\n' ' '
}

models() {
  local words=$WORK/llama_cpp_python-$RELEASE/vendor/llama.cpp/models/ggml-vocab-llama-bpe.gguf
  "$PYTHON" -m bench.random_model "$MODEL" --size "${SIZE:-8b}" --spread 6 --vocabulary "$words"
}

train() { "$PYTHON" bench/mtp_train.py "$TRAINED" --minutes "${1:-4}" --threads 4; }

background() { # it goes on when this command ends
  rm -f "$WORK/$1.done"
  setsid bash -c '"$1" "${@:3}" >"$2.log" 2>&1; echo $? >"$2.done"' _ "$0" "$WORK/$1" "$@" </dev/null >/dev/null 2>&1 &
}

await() { # STEP SECONDS
  local end=$((SECONDS + $2))
  while [ ! -e "$WORK/$1.done" ] && [ $SECONDS -lt $end ]; do sleep 1; done
  echo "$1: exit code $(cat "$WORK/$1.done" 2>/dev/null || echo 'none yet'), after $SECONDS s"
  tail -n "${3:-5}" "$WORK/$1.log"
  cp "$WORK/$1.log" "$OUT/" 2>/dev/null
}

streams() { "$PYTHON" -m modelyard bench --gpu "$MODEL" --json --rounds "${ROUNDS:-2}" "$@" >"$OUT/streams.json"; show_streams; }  # Ctrl-C and SIGINT keep what was measured
show_streams() { "$PYTHON" - "$OUT/streams.json" <<'PY'
import json, sys
found = json.load(open(sys.argv[1]))
for row in found["rows"]:
    print(row["case"], row["unit"], row["server"], *(f"{value:.4g}" for value in row["values"]), sep="\t")
print(*found["notes"], sep="\n")
PY
}
tools() { # llama.cpp alone, without sampling and HTTP
  export LD_LIBRARY_PATH=$LIBRARY:${LD_LIBRARY_PATH:-}
  "$LIBRARY/llama-batched-bench" -m "$MODEL" -ngl 99 -npp 64 -ntg 128 -npl "${WIDTHS:-1,2,4,8,16,32,64}" -c 16384 \
    --output-format jsonl 2>"$OUT/batched.log" | tee "$OUT/batched.jsonl" | cut -c1-400
}
scale() { "$PYTHON" -m bench.scale_out --json "$OUT/scale.json" "$@" 2>&1 | tee "$OUT/scale.txt"; }
mtp() { "$PYTHON" -m bench.mtp "$TRAINED" --server "${LLAMA_SERVER:-$LIBRARY/llama-server}" --json "$OUT/mtp_${1:-gpu}.json" \
  --rounds "${ROUNDS:-4}" --threads "${THREADS:-8}" 2>&1 | tee "$OUT/mtp_${1:-gpu}.txt"; }
mtp_cpu() { CUDA_VISIBLE_DEVICES="" mtp cpu; }
threads() { CUDA_VISIBLE_DEVICES="" "$PYTHON" -m bench.threads --model "$TRAINED" "$@" 2>&1 | tee "$OUT/threads.txt"; }

export LD_LIBRARY_PATH=$LIBRARY:${LD_LIBRARY_PATH:-}
case ${1:-help} in
  pack | unpack | build | models | train | background | streams | show_streams | tools | scale | mtp | mtp_cpu | threads) "$@" ;;
  wait) shift && await "$@" ;;
  *) sed -n '2,17p' "$0" ;;
esac
