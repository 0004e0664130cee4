/* Happens-before: what each thread can be sure to have happened, as vector clocks.
 *
 * Every thread counts its releases; an access is stamped with an Epoch, "thread T before its n-th release". A clock says for each
 * thread up to which count its holder knows. A release copies the thread's clock into the barrier or flag, an acquire joins
 * it. Two accesses of the same bytes race if neither's epoch is known to the other: reported whatever the order of this run.
 * An mbarrier counts as a thread too: its phase n is what a copy's arrival is stamped with.
 *
 * Whole launches of a device that have ended are one number (`ended`), so that clocks stay small. */
#ifndef MK_EMU_ORDER_H
#define MK_EMU_ORDER_H

#include <stdint.h>
#include <memory>
#include <string>
#include <vector>

namespace emu {

struct Thread;

typedef uint64_t Epoch;                          /* CTA number << 40 | member << 28 | count; 0: before everything */
constexpr uint32_t kMemberMbarrier = 1024;       /* members: threads, then mbarriers */
constexpr Epoch kUnobserved = ~0ull;             /* written by a bulk store that its thread has not waited for; on Blackwell, by a store to tensor memory or an allocation, too */
inline Epoch make_epoch(uint32_t cta, uint32_t member, uint32_t count) { return (Epoch)cta << 40 | (Epoch)member << 28 | count; }

class Clock {
public:
    bool knows(Epoch e) const;
    void join(const Clock &other);
    void add(Epoch e);                           /* and everything of that member before it */
    void launch_ended(uint32_t device, uint32_t launch);
    void clear() { ctas_.clear(); ended_.clear(); }
private:
    typedef std::vector<uint32_t> Counts;        /* by member */
    struct Entry { uint32_t cta; std::shared_ptr<Counts> counts, covers; };  /* covers: of another clock, nowhere larger than counts; or null */
    void take(Entry &mine, const Entry &other);
    bool has_ended(uint32_t cta) const;
    std::vector<Entry> ctas_;                    /* ascending */
    std::vector<uint32_t> ended_;                /* by device: launches that have ended */
};

/* Reads of 16 bytes that no later write is known to follow; `bytes` is a bit mask. Beyond a few, some are forgotten. */
struct Reads {
    struct Read { Epoch by; uint32_t bytes; };
    std::vector<Read> list;
};
inline uint32_t byte_mask(size_t from, size_t to) { return (uint32_t)((1u << to) - (1u << from)); }

std::string describe_epoch(Epoch e);
/* The running thread's view. */
bool known_to_self(Epoch e);
bool is_own(Epoch e);
void note_read(Reads &reads, Epoch e, uint32_t bytes);
/* The running thread is about to write these bytes: a read of them that it does not know of, or 0, and then the reads are forgotten. */
Epoch unknown_read(Reads &reads, uint32_t bytes);

} /* namespace emu */
#endif
