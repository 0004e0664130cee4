/* Machine profiles of the simulator as JSON: profiles/NAME.json of the sources or of the installation, or any file. */
#ifndef MOK_CLI_PROFILE_FILE_H
#define MOK_CLI_PROFILE_FILE_H

#include <stdio.h>

#include "sim/profile.h"

#include <stdbool.h>

/* "h200-x2" or a path. A file may name another profile as its "base" and give only what differs. False and one sentence. */
bool profile_load(const char *name_or_path, sim_profile *p, char *error, size_t error_size);
/* "cpu_sync_us=0,link_us=2": figures by hand; NULL is fine. False and one sentence. */
bool profile_set(sim_profile *p, const char *assignments, char *error, size_t error_size);
/* All fields, and where they come from. False if writing failed. */
bool profile_write(FILE *out, const sim_profile *p, const char *source);

#endif
