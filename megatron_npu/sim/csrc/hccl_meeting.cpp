#include "hccl_meeting.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

namespace sim::hccl {

namespace {

using Clock = std::chrono::steady_clock;

constexpr char kMagic[16] = "npu-sim-hccl-2";
constexpr std::chrono::seconds kGreeting{10};  // for a connection to say who it is
constexpr size_t kProblemBytes = 512;

// The first thing said on a connection.
struct Hello {
  char magic[16];
  unsigned char token[kTokenBytes];
  uint32_t ranks;
  uint32_t rank;
  Peer self;
};

// What rank 0 answers; if there is no problem, all peers follow.
struct Answer {
  char problem[kProblemBytes];
};

// The open doors of this process by their ports. Never destroyed, as all that workers may use.
auto& doors_mutex = *new std::mutex;
auto& doors = *new std::map<uint16_t, Socket>;

Socket take_door(const Door& door) {
  std::lock_guard<std::mutex> lock(doors_mutex);
  auto found = doors.find(door.place.port);
  if (found == doors.end()) return {};
  Socket result = std::move(found->second);
  doors.erase(found);
  return result;
}

Socket open_place(Place* place, std::string* problem) {
  const std::string address = own_address();
  Socket result = Socket::listening(address, &place->port);
  std::snprintf(place->address, sizeof place->address, "%s", address.c_str());
  if (!result.valid()) {
    *problem = host_name() + " cannot be connected to at " + address + ": " + std::strerror(errno) +
               "; set HCCL_IF_IP to an address of this machine";
  }
  return result;
}

Hello hello_of(const Door& door, uint32_t ranks, uint32_t rank, const Peer& self) {
  Hello hello{};
  std::memcpy(hello.magic, kMagic, sizeof kMagic);
  std::memcpy(hello.token, door.token, sizeof hello.token);
  hello.ranks = ranks;
  hello.rank = rank;
  hello.self = self;
  return hello;
}

std::string reason() { return errno == 0 ? "it has closed the connection" : std::strerror(errno); }

std::string place_of(const Place& place) { return std::string(place.address) + " port " + std::to_string(place.port); }

// One rank's part in a meeting.
class Guest {
 public:
  Guest(const Door& door, uint32_t ranks, uint32_t rank, Peer self, std::chrono::seconds timeout)
      : door_(door), ranks_(ranks), rank_(rank), self_(self), timeout_(timeout), end_(Clock::now() + timeout) {
    found_.peers.resize(ranks);
    found_.sockets.resize(ranks);
  }

  Meeting run() {
    if (rank_ == 0 ? receive_all() : introduce()) {
      const auto elsewhere = [&](const Peer& peer) { return peer.host != self_.host; };
      if (std::none_of(found_.peers.begin(), found_.peers.end(), elsewhere)) {
        found_.sockets.clear();
      } else if (rank_ != 0) {
        connect_others();
      }
    }
    return std::move(found_);
  }

 private:
  bool fail(const std::string& problem) {
    found_.problem = problem;
    return false;
  }

  // Takes the connections of the ranks from `first` on to this one's place.
  bool take(Socket& place, uint32_t first) {
    for (uint32_t missing_ranks = ranks_ - first; missing_ranks != 0;) {
      Socket guest = place.accept(end_);
      if (!guest.valid()) {
        return fail("timeout after " + std::to_string(timeout_.count()) + " s; " +
                    missing_from(first) + " did not join");
      }
      Hello hello;
      if (!guest.receive(&hello, sizeof hello, std::min(end_, Clock::now() + kGreeting)) || !fits(hello, first)) {
        continue;
      }
      if (hello.ranks != ranks_) {
        return fail("rank " + std::to_string(hello.rank) + " has another number of ranks (" +
                    std::to_string(hello.ranks) + ") than this one (" + std::to_string(ranks_) + ")");
      }
      missing_ranks -= !found_.sockets[hello.rank].valid();
      found_.peers[hello.rank] = hello.self;
      found_.sockets[hello.rank] = std::move(guest);
    }
    return true;
  }

  std::string missing_from(uint32_t first) const {
    std::string text;
    for (uint32_t rank = first; rank < ranks_; rank++) {
      if (!found_.sockets[rank].valid()) text += (text.empty() ? "rank " : ", ") + std::to_string(rank);
    }
    return text;
  }

  bool fits(const Hello& hello, uint32_t first) const {
    return std::memcmp(hello.magic, kMagic, sizeof kMagic) == 0 &&
           std::memcmp(hello.token, door_.token, sizeof hello.token) == 0 && hello.rank >= first &&
           hello.rank < std::min(ranks_, hello.ranks);
  }

  // Rank 0: waits for all, and tells them who all are, or what is wrong.
  bool receive_all() {
    Socket place = take_door(door_);
    if (!place.valid()) return fail("the invitation to this communicator was used before");
    self_.place = door_.place;
    found_.peers[0] = self_;
    const bool all = take(place, 1);
    Answer answer{};
    std::snprintf(answer.problem, sizeof answer.problem, "%s", found_.problem.c_str());
    for (uint32_t rank = 1; rank < ranks_; rank++) {
      Socket& guest = found_.sockets[rank];
      if (!guest.valid()) continue;
      const size_t bytes = found_.peers.size() * sizeof(Peer);
      const bool told = guest.send(&answer, sizeof answer, end_ + kGreeting) &&
                        (!all || guest.send(found_.peers.data(), bytes, end_));
      if (all && !told) return fail("rank " + std::to_string(rank) + " is gone: " + reason());
    }
    return all;
  }

  // The others: say who this is, and hear who all are.
  bool introduce() {
    place_ = open_place(&self_.place, &found_.problem);
    if (!place_.valid()) return false;
    Socket host = Socket::connected(door_.place.address, door_.place.port, end_);
    if (!host.valid()) {
      const std::string refused = errno == ECONNREFUSED ? " is gone: nobody listens at " : " is not reached at ";
      return fail(creator() + refused + place_of(door_.place) + " (" + reason() + ")");
    }
    const Hello hello = hello_of(door_, ranks_, rank_, self_);
    Answer answer;
    if (!host.send(&hello, sizeof hello, end_) || !host.receive(&answer, sizeof answer, end_ + kGreeting)) {
      return fail(errno == ETIMEDOUT ? creator() + " did not join in time" : creator() + " is gone: " + reason());
    }
    if (answer.problem[0]) return fail(creator() + " reported: " + std::string(answer.problem));
    if (!host.receive(found_.peers.data(), ranks_ * sizeof(Peer), end_)) return fail(creator() + " is gone: " + reason());
    found_.sockets[0] = std::move(host);
    return true;
  }

  static std::string creator() { return "the rank that created the communicator"; }

  // Connects to the ranks between 0 and this one, and waits for those above.
  bool connect_others() {
    const Hello hello = hello_of(door_, ranks_, rank_, self_);
    for (uint32_t rank = 1; rank < rank_; rank++) {
      const Place& place = found_.peers[rank].place;
      Socket& socket = found_.sockets[rank];
      socket = Socket::connected(place.address, place.port, end_);
      if (!socket.valid() || !socket.send(&hello, sizeof hello, end_)) {
        return fail("rank " + std::to_string(rank) + " on " + found_.peers[rank].host_name +
                    " is not reached at " + place_of(place) + " (" + reason() + ")");
      }
    }
    return take(place_, rank_ + 1);
  }

  const Door& door_;
  const uint32_t ranks_, rank_;
  Peer self_;
  const std::chrono::seconds timeout_;
  const Deadline end_;
  Socket place_;
  Meeting found_;
};

}  // namespace

bool open_door(Door* door, std::string* problem) {
  if (getrandom(door->token, sizeof door->token, 0) != sizeof door->token) {
    *problem = std::strerror(errno);
    return false;
  }
  Socket place = open_place(&door->place, problem);
  if (!place.valid()) return false;
  std::lock_guard<std::mutex> lock(doors_mutex);
  doors[door->place.port] = std::move(place);
  return true;
}

void close_door(const Door& door) { take_door(door); }

Meeting meet(const Door& door, uint32_t ranks, uint32_t rank, Peer self, std::chrono::seconds timeout) {
  return Guest(door, ranks, rank, self, timeout).run();
}

}  // namespace sim::hccl
