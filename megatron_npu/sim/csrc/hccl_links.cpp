#include "hccl_links.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "hccl_segment.h"

namespace sim::hccl {

enum class Kind : uint32_t { Call, Chunk, Arrived, Consumed, Failure, Split, Goodbye };

// The head of what travels on a connection; `bytes` of data follow.
struct Frame {
  Kind kind;
  uint32_t bytes;
  uint64_t number;  // of chunks, or the rank that failed
  uint64_t message_bytes;
  Call call;
};

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kLast{2};  // for what is left when a communicator ends
constexpr size_t kReadBytes = 1 << 20;

void append(std::string* stream, Frame frame, const void* data = nullptr, size_t bytes = 0) {
  frame.bytes = static_cast<uint32_t>(bytes);
  stream->append(reinterpret_cast<const char*>(&frame), sizeof frame);
  if (bytes != 0) stream->append(static_cast<const char*>(data), bytes);
}

}  // namespace

Links::Links(Segment& segment, uint32_t rank, std::vector<Socket> sockets)
    : segment_(segment), rank_(rank), bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  for (uint32_t peer = 0; peer < sockets.size(); peer++) {
    links_.push_back(peer == rank ? nullptr : std::make_unique<Link>());
    if (peer != rank) links_.back()->socket = std::move(sockets[peer]);
  }
  thread_ = std::thread([this] { work(); });
}

Links::~Links() {
  closing_ = true;
  wake();
  thread_.join();
  close(bell_);
}

void Links::wake() {
  const uint64_t one = 1;
  if (::write(bell_, &one, sizeof one) < 0) return;  // full: the thread is awake
}

bool Links::connected(uint32_t peer) const { return !links_[peer] || !links_[peer]->lost; }

bool Links::delivered(uint32_t peer) const {
  if (!links_[peer]) return true;
  return links_[peer]->arrived >= segment_.channel(rank_, peer).written.load(std::memory_order_relaxed);
}

bool Links::told(uint32_t peer) const {
  return !links_[peer] || links_[peer]->told >= segment_.channel(peer, rank_).consumed.load(std::memory_order_relaxed);
}

void Links::offer(uint32_t peer, const Split& split) {
  std::string text;
  Frame frame{Kind::Split, 0, split.first_member, split.id, {}};
  append(&text, frame, &split.invitation, sizeof split.invitation);
  {
    std::lock_guard<std::mutex> lock(offers_mutex_);
    links_[peer]->offers.push_back(std::move(text));
  }
  wake();
}

void Links::send_failure() {
  const auto sent = [](const auto& link) { return !link || link->lost || link->failure_sent; };
  const auto end = Clock::now() + std::chrono::seconds(1);
  while (!std::all_of(links_.begin(), links_.end(), sent) && Clock::now() < end) {
    wake();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// ---- the thread

void Links::work() {
  Deadline end = Deadline::max();
  for (;;) {
    const bool closing = closing_;
    if (closing && end == Deadline::max()) end = Clock::now() + kLast;
    bool left = false;
    for (uint32_t peer = 0; peer < links_.size(); peer++) {
      if (!links_[peer] || !links_[peer]->open) continue;
      collect(peer);
      write(peer);
      left |= !links_[peer]->outgoing.empty();
    }
    if (closing && (!left || Clock::now() > end)) break;
    wait();
  }
  for (uint32_t peer = 0; peer < links_.size(); peer++) {
    if (!links_[peer] || !links_[peer]->open) continue;
    append(&links_[peer]->outgoing, Frame{Kind::Goodbye, 0, 0, 0, {}});
    write(peer);
  }
}

// Notes for a peer what this rank has changed.
void Links::collect(uint32_t peer) {
  Link& link = *links_[peer];
  collect_calls(peer);
  collect_chunks(peer);
  const uint64_t consumed = segment_.channel(peer, rank_).consumed.load(std::memory_order_acquire);
  if (consumed != link.acknowledged) {
    append(&link.outgoing, Frame{Kind::Consumed, 0, consumed, 0, {}});
    link.acknowledged = consumed;
  }
  const Failure& failure = segment_.header().failure;
  if (!link.failure_sent && failure.state.load(std::memory_order_acquire) == kWritten) {
    append(&link.outgoing, Frame{Kind::Failure, 0, failure.rank, 0, {}}, failure.text, sizeof failure.text);
    write(peer);
    link.failure_sent = true;
  }
  std::lock_guard<std::mutex> lock(offers_mutex_);
  for (const std::string& offer : link.offers) link.outgoing += offer;
  link.offers.clear();
}

void Links::collect_calls(uint32_t peer) {
  Link& link = *links_[peer];
  const Member& self = segment_.member(rank_);
  const uint64_t entered = self.entered.load();
  // older ones are no longer remembered
  const uint64_t oldest = entered < kRemembered - 1 ? 0 : entered - (kRemembered - 1);
  for (uint64_t number = std::max(link.entered, oldest) + 1; number <= entered; number++) {
    append(&link.outgoing, Frame{Kind::Call, 0, number, 0, self.calls[number % kRemembered]});
  }
  link.entered = entered;
}

void Links::collect_chunks(uint32_t peer) {
  Link& link = *links_[peer];
  Channel& channel = segment_.channel(rank_, peer);
  for (const uint64_t written = channel.written.load(std::memory_order_acquire); link.sent < written; link.sent++) {
    const Chunk& chunk = channel.slots[link.sent % kSlots];
    const uint64_t bytes = std::min<uint64_t>(kChunkBytes, chunk.message_bytes - link.sent_of_front);
    append(&link.outgoing, Frame{Kind::Chunk, 0, link.sent, chunk.message_bytes, chunk.call}, chunk.data, bytes);
    link.sent_of_front += bytes;
    if (link.sent_of_front >= chunk.message_bytes) link.sent_of_front = 0;
  }
}

// Sends what the connection takes now.
void Links::write(uint32_t peer) {
  Link& link = *links_[peer];
  size_t done = 0;
  while (done < link.outgoing.size()) {
    const ssize_t sent =
        ::send(link.socket.file(), link.outgoing.data() + done, link.outgoing.size() - done, MSG_NOSIGNAL);
    if (sent > 0) {
      done += sent;
      continue;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return read(peer);  // what came before the end counts
    break;
  }
  link.outgoing.erase(0, done);
  if (link.outgoing.empty() && link.told != link.acknowledged) {
    link.told = link.acknowledged;
    segment_.ring(rank_);
  }
}

void Links::read(uint32_t peer) {
  Link& link = *links_[peer];
  static thread_local std::vector<char> buffer(kReadBytes);
  ssize_t got;
  while (link.open && (got = recv(link.socket.file(), buffer.data(), buffer.size(), 0)) != 0) {
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got < 0) break;
    link.incoming.append(buffer.data(), got);
    size_t done = 0;
    Frame frame;
    while (link.incoming.size() - done >= sizeof frame) {
      std::memcpy(&frame, link.incoming.data() + done, sizeof frame);
      if (frame.bytes > kReadBytes) return lose(peer);
      if (link.incoming.size() - done < sizeof frame + frame.bytes) break;
      take(peer, frame, link.incoming.data() + done + sizeof frame);
      done += sizeof frame + frame.bytes;
    }
    link.incoming.erase(0, done);
  }
  lose(peer);
}

void Links::lose(uint32_t peer) {
  Link& link = *links_[peer];
  link.outgoing.clear();
  link.open = false;
  link.lost = !link.left;
  link.told = UINT64_MAX;  // there is nobody to tell
  segment_.ring(rank_);
}

// Changes this rank's memory as a peer says.
void Links::take(uint32_t peer, const Frame& frame, const char* data) {
  Link& link = *links_[peer];
  Channel& incoming = segment_.channel(peer, rank_);
  Member& member = segment_.member(peer);
  switch (frame.kind) {
    case Kind::Call:
      member.calls[frame.number % kRemembered] = frame.call;
      member.entered.store(frame.number);
      break;
    case Kind::Chunk: {
      const uint64_t written = incoming.written.load(std::memory_order_relaxed);
      Chunk& chunk = incoming.slots[written % kSlots];
      chunk.call = frame.call;
      chunk.message_bytes = frame.message_bytes;
      std::memcpy(chunk.data, data, std::min<size_t>(frame.bytes, kChunkBytes));
      incoming.written.store(written + 1, std::memory_order_release);
      collect_calls(peer);
      append(&link.outgoing, Frame{Kind::Arrived, 0, written + 1, 0, {}});
      break;
    }
    case Kind::Arrived: link.arrived = frame.number; break;
    case Kind::Consumed: segment_.channel(rank_, peer).consumed.store(frame.number, std::memory_order_release); break;
    case Kind::Failure: segment_.fail(static_cast<uint32_t>(frame.number), data); break;
    case Kind::Split: {
      Invitation invitation;
      std::memcpy(&invitation, data, sizeof invitation);
      segment_.put_up(static_cast<uint32_t>(frame.number), frame.message_bytes, invitation);
      break;
    }
    case Kind::Goodbye: link.left = true; break;
  }
  segment_.ring(rank_);
}

// Sleeps until somebody has something to say.
void Links::wait() {
  std::vector<pollfd> entries{{bell_, POLLIN, 0}};
  std::vector<uint32_t> peers{rank_};
  for (uint32_t peer = 0; peer < links_.size(); peer++) {
    if (!links_[peer] || !links_[peer]->open) continue;
    const short events = links_[peer]->outgoing.empty() ? POLLIN : POLLIN | POLLOUT;
    entries.push_back({links_[peer]->socket.file(), events, 0});
    peers.push_back(peer);
  }
  if (poll(entries.data(), entries.size(), std::chrono::milliseconds(kNap).count()) <= 0) return;
  uint64_t rings;
  if (entries[0].revents && ::read(bell_, &rings, sizeof rings) < 0) return;
  for (size_t i = 1; i < entries.size(); i++) {
    if (entries[i].revents & (POLLIN | POLLHUP | POLLERR)) read(peers[i]);
  }
}

}  // namespace sim::hccl
