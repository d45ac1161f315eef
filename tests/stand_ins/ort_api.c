/* A library with the functions of ONNX Runtime that lead to a session, and no session: each graph is refused. It shows
 * what is asked of an engine before that, on systems for which none is here. VERSION: what it says. BARRED: whoever asks
 * for its functions, which an older version has differently, ends the process. */
#include <stdio.h>
#include <stdlib.h>
#ifdef __MINGW32__
#define _Return_type_success_(holds)
#endif
#include "onnxruntime_c_api.h"

static int thing; /* every environment, option and refusal is this one */

static OrtStatus *ORT_API_CALL env(OrtLoggingFunction log, void *to, OrtLoggingLevel level, const char *name, OrtEnv **made) {
    (void)log, (void)to, (void)level, (void)name;
    *made = (OrtEnv *)&thing;
    return NULL;
}
static OrtStatus *ORT_API_CALL memory(enum OrtAllocatorType kind, enum OrtMemType of, OrtMemoryInfo **made) {
    (void)kind, (void)of;
    *made = (OrtMemoryInfo *)&thing;
    return NULL;
}
static OrtStatus *ORT_API_CALL options(OrtSessionOptions **made) {
    *made = (OrtSessionOptions *)&thing;
    return NULL;
}
static OrtStatus *ORT_API_CALL untold(const OrtEnv *of) { return (void)of, NULL; }
static OrtStatus *ORT_API_CALL set(OrtSessionOptions *of) { return (void)of, NULL; }
static OrtStatus *ORT_API_CALL set_number(OrtSessionOptions *of, int to) { return (void)of, (void)to, NULL; }
static OrtStatus *ORT_API_CALL set_entry(OrtSessionOptions *of, const char *name, const char *to) {
    return (void)of, (void)name, (void)to, NULL;
}
static OrtStatus *ORT_API_CALL session(const OrtEnv *in, const void *graph, size_t bytes, const OrtSessionOptions *by,
                                       OrtSession **made) {
    (void)in, (void)graph, (void)bytes, (void)by, (void)made;
    return (OrtStatus *)&thing;
}
static const char *ORT_API_CALL said(const OrtStatus *status) { return (void)status, "no session in a stand-in"; }
static void ORT_API_CALL release_env(OrtEnv *one) { (void)one; }
static void ORT_API_CALL release_memory(OrtMemoryInfo *one) { (void)one; }
static void ORT_API_CALL release_options(OrtSessionOptions *one) { (void)one; }
static void ORT_API_CALL release_status(OrtStatus *one) { (void)one; }

static const OrtApi *ORT_API_CALL api(uint32_t version) {
    static OrtApi functions;
#ifdef BARRED
    fputs("asked for functions of an engine that is too old\n", stderr);
    exit(99);
#endif
    if (version != ORT_API_VERSION) return NULL;
    functions.CreateEnvWithCustomLogger = env, functions.DisableTelemetryEvents = untold;
    functions.CreateCpuMemoryInfo = memory, functions.CreateSessionOptions = options;
    functions.SetSessionLogSeverityLevel = functions.SetInterOpNumThreads = functions.SetIntraOpNumThreads = set_number;
    functions.EnableCpuMemArena = functions.DisableCpuMemArena = functions.DisableMemPattern = set;
    functions.AddSessionConfigEntry = set_entry, functions.CreateSessionFromArray = session;
    functions.GetErrorMessage = said, functions.ReleaseStatus = release_status;
    functions.ReleaseEnv = release_env, functions.ReleaseMemoryInfo = release_memory;
    functions.ReleaseSessionOptions = release_options;
    return &functions;
}
static const char *ORT_API_CALL version(void) { return VERSION; }

#ifdef _WIN32
__declspec(dllexport)
#endif
const OrtApiBase *ORT_API_CALL OrtGetApiBase(void) {
    static const OrtApiBase base = {api, version};
    return &base;
}
