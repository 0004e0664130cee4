#include "sim/profile.h"

#include <stddef.h>
#include <string.h>

const sim_profile_entry sim_profile_entries[SIM_PROFILE_FIELDS] = {
#define ENTRY(field, default_, text) {#field, text, default_, (int)offsetof(sim_profile, field)},
    SIM_PROFILE_LIST(ENTRY)
#undef ENTRY
};

static double *field_at(sim_profile *p, int i) { return (double *)(void *)((char *)p + sim_profile_entries[i].offset); }

void sim_profile_defaults(sim_profile *p)
{
    memset(p, 0, sizeof *p);
    for (int i = 0; i < SIM_PROFILE_FIELDS; i++)
        *field_at(p, i) = sim_profile_entries[i].default_value;
}

double *sim_profile_field(sim_profile *p, const char *name)
{
    for (int i = 0; i < SIM_PROFILE_FIELDS; i++)
        if (strcmp(name, sim_profile_entries[i].name) == 0)
            return field_at(p, i);
    return NULL;
}
