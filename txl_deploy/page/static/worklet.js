// @ts-check
/** The audio thread's part of the microphone: it hands over chunks of samples by message, and waits for nobody. */

/**
 * What every AudioWorklet has.
 * @type {{AudioWorkletProcessor: new () => {port: MessagePort}, registerProcessor: (name: string, kind: Function) => void}}
 */
const scope = /** @type {any} */ (globalThis);

scope.registerProcessor("chunks", class extends scope.AudioWorkletProcessor {
  /** @param {{processorOptions: {size: number}}} options samples of a chunk */
  constructor({ processorOptions: { size } }) {
    super();
    this.chunk = new Float32Array(size);
    this.filled = 0;
  }

  /** Take what was heard since the last call. @param {Float32Array[][]} inputs by input and channel; no channel while nothing is connected */
  process([[heard]]) {
    for (let at = 0; at < (heard?.length ?? 0); ) {
      const part = heard.subarray(at, at + this.chunk.length - this.filled);
      this.chunk.set(part, this.filled);
      this.filled += part.length;
      at += part.length;
      if (this.filled < this.chunk.length) break;
      this.port.postMessage(this.chunk, [this.chunk.buffer]);
      [this.chunk, this.filled] = [new Float32Array(this.filled), 0]; // the old one is the page's now
    }
    return true;
  }
});

export {};
