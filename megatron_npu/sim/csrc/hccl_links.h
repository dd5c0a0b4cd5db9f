// The connections of a rank to the others of a communicator that is on several machines.
//
// Each process has a segment of its own (hccl_segment.h), of which only its own parts are used: its calls,
// its failure, and the channels from and to it. A thread carries what the rank changes there to the others,
// and changes there what the others say, so that all that looks into a segment works as it does in shared
// memory:
//
//   rank      what the thread sends                        the other rank's thread
//   ------    -----------------------------------------    ------------------------------------------
//   enters    the call                                     puts it into the member of this rank
//   writes    the chunk                                    puts it into its channel; answers "arrived"
//   consumes  how many chunks of the channel               lets the writer use the slot again
//   fails     the failure                                  takes it over
//   splits    the invitation to the sub-communicator       puts it up
//   leaves    a goodbye                                    takes the end of the connection for no death
//
// What a rank sends to another arrives in order. A call arrives before the chunks of its collective, and an
// "arrived" comes after the calls that the other has entered: a rank that has sent all has seen them.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "hccl_socket.h"

namespace sim::hccl {

class Segment;
struct Split;
struct Frame;

class Links {
 public:
  // `sockets`: by rank, that of `rank` invalid.
  Links(Segment& segment, uint32_t rank, std::vector<Socket> sockets);
  ~Links();  // sends what is left, a goodbye at the end
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  // Has the thread look for what this rank has changed.
  void wake();
  // Whether the connection to a rank holds, or was ended by a goodbye.
  bool connected(uint32_t peer) const;
  // Whether all chunks that were written for a rank have arrived in its memory.
  bool delivered(uint32_t peer) const;
  // Whether a rank will learn that all its chunks have arrived and been consumed, even if this process ends now.
  bool told(uint32_t peer) const;
  // Sends an invitation to a sub-communicator.
  void offer(uint32_t peer, const Split& split);
  // Waits, for a moment at most, until this rank's failure is on its way to all.
  void send_failure();

 private:
  struct Link {
    Socket socket;
    bool open = true;               // of the thread: nothing has ended it yet
    bool left = false;              // the other has said goodbye
    std::atomic<bool> lost{false};  // it ended without
    std::atomic<uint64_t> arrived{0};  // chunks, of those written for the other
    std::atomic<bool> failure_sent{false};
    std::atomic<uint64_t> told{0};  // chunks consumed, of which the connection has taken the news
    uint64_t sent = 0;          // chunks
    uint64_t sent_of_front = 0;  // bytes of the message whose chunks are being sent
    uint64_t acknowledged = 0;  // chunks that this rank has consumed, as the other knows
    uint64_t entered = 0;       // the last call that the other knows
    std::string outgoing, incoming;
    std::deque<std::string> offers;
  };

  void work();
  void collect(uint32_t peer);
  void collect_calls(uint32_t peer);
  void collect_chunks(uint32_t peer);
  void write(uint32_t peer);
  void read(uint32_t peer);
  void lose(uint32_t peer);
  void take(uint32_t peer, const Frame& frame, const char* data);
  void wait();

  Segment& segment_;
  const uint32_t rank_;
  std::vector<std::unique_ptr<Link>> links_;  // by rank; null for the own one
  int bell_;                                  // an eventfd
  std::atomic<bool> closing_{false};
  std::mutex offers_mutex_;
  std::thread thread_;
};

}  // namespace sim::hccl
