// @ts-check
/** The microphone, as chunks of samples in order. They wait here for the engine; the audio thread waits for nobody. */

const MOST = 10; // seconds of sound that may wait: an engine that is slower than the sound never catches up

/**
 * Yield what the microphone hears until the signal ends it.
 * @param {string} worklet address of the module worklet.js
 * @param {number} rate samples a second, into which the browser converts the sound
 * @param {number} size samples of a chunk
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<{chunk: Float32Array, waiting: number}, void, void>} with the number of chunks behind it
 */
export async function* chunksOf(worklet, rate, size, signal) {
  if (!navigator.mediaDevices) throw new Error("this page may not ask for a microphone, expected one of https or localhost; serve it so");
  const wanted = { audio: { echoCancellation: false, noiseSuppression: false, autoGainControl: false } };
  const sound = await navigator.mediaDevices.getUserMedia(wanted).catch((error) => {
    throw new Error(`the browser gives no microphone (${error.message}), expected its leave; allow it for this page`);
  });
  let context = /** @type {AudioContext | undefined} */ (undefined);
  try {
    context = new AudioContext({ sampleRate: rate }); // fails at a rate that the browser does not have
    await context.audioWorklet.addModule(worklet);
    const options = { numberOfOutputs: 0, channelCount: 1, channelCountMode: /** @type {const} */ ("explicit"), processorOptions: { size } };
    const node = new AudioWorkletNode(context, "chunks", options);
    const waiting = /** @type {Float32Array[]} */ ([]);
    let wake = () => {};
    node.port.onmessage = ({ data }) => {
      waiting.push(data);
      wake();
    };
    const [track] = sound.getTracks();
    track.onended = signal.onabort = () => wake();
    context.createMediaStreamSource(sound).connect(node);
    while (!signal.aborted) {
      const chunk = waiting.shift();
      if (waiting.length * size > MOST * rate) throw new Error(`${MOST} s of sound wait for the model, expected steps that take less time than the sound; take a faster machine or a smaller model`);
      if (chunk) yield { chunk, waiting: waiting.length };
      else if (track.readyState === "ended") throw new Error("the microphone has ended, expected one that stays connected; connect it and listen again");
      else await new Promise((next) => (wake = () => next(null)));
    }
  } finally {
    for (const track of sound.getTracks()) track.stop();
    await context?.close();
  }
}
