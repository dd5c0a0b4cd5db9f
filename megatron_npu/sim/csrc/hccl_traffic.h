// What each communicator of this process costs: messages, their bytes, and HCCL's buffer.
#pragma once

#include <cstdint>
#include <string>

namespace sim::hccl {

// Notes a new communicator; `buffer`: MiB asked for in HcclCommConfig, kBufferNotSet for the default.
constexpr uint32_t kBufferNotSet = 0xffffffff;
void note_communicator(const std::string& name, uint32_t ranks, uint32_t buffer);

// Notes that a communicator is destroyed: what it has sent stays counted, its buffer is free.
void note_destroyed(const std::string& name);

// Counts a call on a communicator: the bytes that this rank hands over, and its larger buffer.
void count_message(const std::string& name, uint64_t bytes, uint64_t larger);

// Counts a message of this rank to another: within this machine, or `between` machines.
void count_sent(const std::string& name, bool between, uint64_t bytes);

}  // namespace sim::hccl
