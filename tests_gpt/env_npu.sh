# shellcheck shell=bash
# Environment of a run on Ascend NPUs; the scripts of this folder source it. Harmless where there is no CANN.

toolkit=${ASCEND_TOOLKIT_HOME:-/usr/local/Ascend/ascend-toolkit}
if [ -f "$toolkit/set_env.sh" ]; then
    set +u # CANN's script reads variables that may be unset
    # shellcheck disable=SC1091
    source "$toolkit/set_env.sh"
    set -u
fi

export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-1200}       # seconds; the first step compiles operators
export TASK_QUEUE_ENABLE=${TASK_QUEUE_ENABLE:-1}                # launch operators from a second thread
export COMBINED_ENABLE=${COMBINED_ENABLE:-1}                    # join what is not contiguous in one operator
export ASCEND_SLOG_PRINT_TO_STDOUT=${ASCEND_SLOG_PRINT_TO_STDOUT:-0}
export ASCEND_GLOBAL_LOG_LEVEL=${ASCEND_GLOBAL_LOG_LEVEL:-3}    # errors only
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # for CUDA; upstream asks for it
