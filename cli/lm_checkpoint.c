#include "lm_checkpoint.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char magic[8] = "mok-lm 1";

enum { FLAG_DROP_ROUTES = 1, FLAG_MXFP8 = 2 };

typedef struct head {
    char magic[8];
    int64_t hidden, intermediate, shared_intermediate, layers, experts, topk, context, tokens, flags;
    uint64_t seed;
    double balance, rate;
    uint64_t text;
    int64_t step, num_points, elements; /* elements: of all tensors */
} head;

/* A file with a running checksum of what went through. */
typedef struct stream {
    FILE *file;
    const char *path;
    uint64_t checksum;
    bool failed;
} stream;

static void add_to_checksum(stream *s, const void *bytes, size_t size)
{
    const unsigned char *b = bytes;
    uint64_t hash = s->checksum;
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ b[i]) * 0x100000001b3ull;
    s->checksum = hash;
}

static void put(stream *s, const void *bytes, size_t size)
{
    add_to_checksum(s, bytes, size);
    s->failed |= size && fwrite(bytes, 1, size, s->file) != size;
}

static void get(stream *s, void *bytes, size_t size)
{
    s->failed |= size && fread(bytes, 1, size, s->file) != size;
    if (!s->failed)
        add_to_checksum(s, bytes, size);
}

static int64_t count_elements(const lm *model)
{
    int64_t count, elements = 0;
    const lm_tensor *t = lm_tensors(model, &count);
    for (int64_t i = 0; i < count; i++)
        elements += t[i].count;
    return elements;
}

/* ------------------------------------------------------------------------------------------------------- writing -- */
static void put_all(stream *s, const lm *model, const lm_config *c, const lm_run *run)
{
    int64_t count;
    const lm_tensor *t = lm_tensors(model, &count);
    head h = {.hidden = c->hidden, .intermediate = c->intermediate, .shared_intermediate = c->shared_intermediate, .layers = c->layers,
              .experts = c->experts, .topk = c->topk, .context = c->context, .tokens = c->tokens, .flags = (c->drop_routes ? FLAG_DROP_ROUTES : 0) | (c->mxfp8 ? FLAG_MXFP8 : 0), .seed = c->seed,
              .balance = c->balance, .rate = run->rate, .text = run->text, .step = run->step, .num_points = run->num_points,
              .elements = count_elements(model)};
    memcpy(h.magic, magic, sizeof magic);
    put(s, &h, sizeof h);
    put(s, run->losses, sizeof *run->losses * (size_t)run->step);
    put(s, run->points, sizeof *run->points * (size_t)run->num_points);
    for (int64_t i = 0; i < count; i++) {
        put(s, t[i].value, sizeof(float) * (size_t)t[i].count);
        put(s, t[i].m, sizeof(float) * (size_t)t[i].count);
        put(s, t[i].v, sizeof(float) * (size_t)t[i].count);
    }
    uint64_t checksum = s->checksum;
    put(s, &checksum, sizeof checksum);
}

bool lm_checkpoint_write(const char *path, const lm *model, const lm_config *cfg, const lm_run *run, char error[LM_ERROR])
{
    size_t size = strlen(path) + 32;
    char *temporary = malloc(size);
    if (!temporary) {
        snprintf(error, LM_ERROR, "out of memory");
        return false;
    }
    snprintf(temporary, size, "%s.%ld.tmp", path, (long)getpid());
    stream s = {.file = fopen(temporary, "wb"), .path = path};
    bool ok = s.file != NULL;
    if (ok) {
        put_all(&s, model, cfg, run);
        ok = !s.failed && fflush(s.file) == 0 && fsync(fileno(s.file)) == 0;
        ok = fclose(s.file) == 0 && ok && rename(temporary, path) == 0;
    }
    if (!ok) {
        snprintf(error, LM_ERROR, "cannot write the checkpoint %s: %s", path, strerror(errno));
        if (s.file)
            unlink(temporary);
    }
    free(temporary);
    return ok;
}

/* ------------------------------------------------------------------------------------------------------- reading -- */
static bool refuse(const stream *s, const char *why, char error[LM_ERROR])
{
    snprintf(error, LM_ERROR, "%s is not a checkpoint of mok train that can be resumed: %s", s->path, why);
    return false;
}

static bool open_for_reading(stream *s, const char *path, char error[LM_ERROR])
{
    *s = (stream){.file = fopen(path, "rb"), .path = path};
    if (!s->file)
        snprintf(error, LM_ERROR, "cannot read the checkpoint %s: %s", path, strerror(errno));
    return s->file != NULL;
}

/* Everything up to the last eight bytes must give these. Leaves the file at its begin. */
static bool verify(stream *s, int64_t *size, char error[LM_ERROR])
{
    char buffer[1 << 16];
    uint64_t written;
    if (fseek(s->file, 0, SEEK_END) || (*size = ftell(s->file)) < 0 || fseek(s->file, 0, SEEK_SET))
        return refuse(s, "it cannot be searched", error);
    if (*size < (int64_t)(sizeof(head) + sizeof written))
        return refuse(s, "it is too short", error);
    for (int64_t left = *size - (int64_t)sizeof written; left > 0 && !s->failed;) {
        size_t n = left < (int64_t)sizeof buffer ? (size_t)left : sizeof buffer;
        get(s, buffer, n);
        left -= (int64_t)n;
    }
    uint64_t checksum = s->checksum;
    get(s, &written, sizeof written);
    if (s->failed)
        return refuse(s, "it cannot be read", error);
    s->checksum = 0;
    rewind(s->file);
    return checksum == written || refuse(s, "its checksum is wrong, so it is damaged, cut off or something else", error);
}

/* The checksum only says that the file is as it was written; sizes are still checked before memory is taken. */
static bool is_plausible(const head *h, int64_t size)
{
    double expected = (double)sizeof *h + 8.0 * (double)h->step + (double)sizeof(lm_point) * (double)h->num_points + 12.0 * (double)h->elements + 8.0;
    return !memcmp(h->magic, magic, sizeof magic) && h->step >= 0 && h->num_points >= 0 && h->elements >= 0 && expected == (double)size;
}

static bool get_run(stream *s, const head *h, lm_run *run, char error[LM_ERROR])
{
    *run = (lm_run){.step = h->step, .rate = h->rate, .text = h->text, .num_points = h->num_points};
    run->losses = malloc(sizeof *run->losses * (size_t)(h->step + 1));
    run->points = malloc(sizeof *run->points * (size_t)(h->num_points + 1));
    if (!run->losses || !run->points)
        return refuse(s, "there is no memory for its curve", error);
    get(s, run->losses, sizeof *run->losses * (size_t)h->step);
    get(s, run->points, sizeof *run->points * (size_t)h->num_points);
    return !s->failed || refuse(s, "it cannot be read", error);
}

bool lm_checkpoint_read(const char *path, lm_config *c, lm_run *run, char error[LM_ERROR])
{
    stream s;
    head h;
    int64_t size = 0;
    *run = (lm_run){.step = 0};
    if (!open_for_reading(&s, path, error))
        return false;
    bool ok = verify(&s, &size, error);
    if (ok) {
        get(&s, &h, sizeof h);
        ok = (!s.failed && is_plausible(&h, size)) || refuse(&s, "it is of another kind or version", error);
    }
    if (ok)
        *c = (lm_config){.hidden = h.hidden, .intermediate = h.intermediate, .shared_intermediate = h.shared_intermediate, .layers = h.layers,
                         .experts = h.experts, .topk = h.topk, .context = h.context, .tokens = h.tokens, .drop_routes = h.flags & FLAG_DROP_ROUTES, .mxfp8 = h.flags & FLAG_MXFP8,
                         .seed = h.seed, .balance = h.balance};
    ok = ok && get_run(&s, &h, run, error);
    fclose(s.file);
    if (!ok)
        lm_run_free(run);
    return ok;
}

bool lm_checkpoint_load(const char *path, lm *model, char error[LM_ERROR])
{
    stream s;
    head h;
    int64_t count;
    const lm_tensor *t = lm_tensors(model, &count);
    if (!open_for_reading(&s, path, error))
        return false;
    get(&s, &h, sizeof h);
    bool ok = (!s.failed && h.elements == count_elements(model)) || refuse(&s, "it does not fit the model", error);
    if (ok && fseek(s.file, (long)(sizeof(double) * (size_t)h.step + sizeof(lm_point) * (size_t)h.num_points), SEEK_CUR))
        ok = refuse(&s, "it cannot be searched", error);
    for (int64_t i = 0; i < count && ok; i++) {
        get(&s, t[i].value, sizeof(float) * (size_t)t[i].count);
        get(&s, t[i].m, sizeof(float) * (size_t)t[i].count);
        get(&s, t[i].v, sizeof(float) * (size_t)t[i].count);
        ok = !s.failed || refuse(&s, "it cannot be read", error);
    }
    fclose(s.file);
    lm_values_changed(model);
    return ok;
}

void lm_run_free(lm_run *run)
{
    free(run->losses);
    free(run->points);
    *run = (lm_run){.step = 0};
}
