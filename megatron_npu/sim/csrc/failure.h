// Failures that reach the program late: those of queued work, and texts for the exceptions of torch_npu.
#pragma once

#include <string>

namespace sim {

// Keeps a text for the calling thread's next aclGetRecentErrMsg: torch_npu asks for it when a CANN function
// has returned an error, and puts the answer into its exception.
void set_recent_error(const std::string& text);

// Fails the device for the rest of the process, as an error of a task does on hardware: from now on whatever
// synchronises returns an error, and `text` says why. Only the first failure counts. Prints it, too: the
// watchdog of torch_npu may end the process before anything synchronises.
void fail_device(const std::string& text);

// What a function that synchronises has to return.
int device_status();

}  // namespace sim
