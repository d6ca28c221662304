// Helpers of the pages. Everything else is NiceGUI's.
document.documentElement.lang = 'en';
window.modelyard = {
  // Keep the end of a growing element in view, unless the user has scrolled up to read.
  follow(element) {
    if (!element || element.modelyardFollows !== undefined) return;
    element.modelyardFollows = true;
    const atEnd = () => element.scrollHeight - element.scrollTop - element.clientHeight < 48;
    const update = () => {
      if (element.modelyardFollows) element.scrollTop = element.scrollHeight;
      element.classList.toggle('detached', !element.modelyardFollows && !atEnd());
    };
    element.addEventListener('wheel', (event) => { if (event.deltaY < 0) element.modelyardFollows = false; }, { passive: true });
    element.addEventListener('touchmove', () => { element.modelyardFollows = atEnd(); }, { passive: true });
    element.addEventListener('keydown', (event) => {
      if (['PageUp', 'ArrowUp', 'Home'].includes(event.key)) element.modelyardFollows = false;
    });
    element.addEventListener('scroll', () => {
      element.modelyardFollows = atEnd() || (element.modelyardFollows && element.scrollTop >= element.modelyardTop);
      element.modelyardTop = element.scrollTop;
      update();
    });
    element.addEventListener('load', update, true);
    new MutationObserver(update).observe(element, { childList: true, subtree: true, characterData: true });
    update();
  },
  // A cookie for the key; returns why it is refused, or ''.
  async login(key) {
    try {
      const reply = await fetch('/workbench/login', { method: 'POST', headers: { authorization: `Bearer ${key}` } });
      return reply.ok ? '' : (await reply.json()).error.message;
    } catch { return 'the server cannot be reached, or this is no key'; }
  },
  async logout() {
    await fetch('/workbench/login', { method: 'DELETE', body: '' }); // it has a length then
  },
  jump(element) {
    if (!element) return;
    element.modelyardFollows = true;
    element.scrollTop = element.scrollHeight;
  },
  // Whether the text was copied. navigator.clipboard exists on https and localhost only, and may be refused.
  async copy(text) {
    if (navigator.clipboard && window.isSecureContext) {
      try { await navigator.clipboard.writeText(text); return true; } catch { /* the old way */ }
    }
    const area = document.createElement('textarea');
    area.value = text;
    area.style.position = 'fixed';
    document.body.append(area);
    area.select();
    const copied = document.execCommand('copy');
    area.remove();
    return copied;
  },
  // Open or close a panel of the chat: 'list' is shown on wide pages, 'side' is not, until it is flipped.
  toggle(page, panel) {
    page.classList.toggle(`flip-${panel}`);
    if (window.innerWidth < 1200) page.classList.remove(`flip-${panel === 'list' ? 'side' : 'list'}`); // both would cover it
  },
  // Record from the microphone until the next call, and give it to the uploader as WAV with 16 kHz, which engines read.
  async record(button, uploader) {
    if (this.recorder) { this.recorder.stop(); return; }
    let stream;
    try { stream = await navigator.mediaDevices.getUserMedia({ audio: true }); } catch { /* refused, or no microphone */ }
    if (!stream) { Quasar.Notify.create({ type: 'negative', message: 'The browser gives this page no microphone.' }); return; }
    const recorder = this.recorder = new MediaRecorder(stream), pieces = [];
    recorder.ondataavailable = (event) => pieces.push(event.data);
    recorder.onstop = async () => {
      this.recorder = undefined;
      button.classList.remove('recording');
      stream.getTracks().forEach((track) => track.stop());
      const sound = await new OfflineAudioContext(1, 1, 16000).decodeAudioData(await new Blob(pieces).arrayBuffer());
      const name = `recording-${new Date().toISOString().slice(11, 19).replaceAll(':', '')}.wav`;
      getElement(uploader).$refs.qRef.addFiles([new File([this.wav(sound.getChannelData(0))], name, { type: 'audio/wav' })]);
    };
    button.classList.add('recording');
    recorder.start();
  },
  wav(samples) {
    const view = new DataView(new ArrayBuffer(44 + samples.length * 2));
    const words = ['RIFF', 36 + samples.length * 2, 'WAVE', 'fmt ', 16, 0x10001, 16000, 32000, 0x100002, 'data', samples.length * 2];
    words.forEach((word, at) => {
      if (typeof word === 'number') view.setUint32(at * 4, word, true);
      else [...word].forEach((letter, next) => view.setUint8(at * 4 + next, letter.charCodeAt(0)));
    });
    samples.forEach((value, at) => view.setInt16(44 + at * 2, Math.max(-1, Math.min(1, value)) * 32767, true));
    return view.buffer;
  },
  // What a model wrote runs in a frame without an origin, and its policy lets it load nothing.
  preview(code, button) {
    const shown = code.querySelector('iframe');
    button.textContent = shown ? 'Preview' : 'Code';
    code.classList.toggle('previewed', !shown);
    if (shown) { shown.remove(); return; }
    const frame = document.createElement('iframe');
    frame.sandbox = 'allow-scripts';
    frame.title = 'Preview of the code';
    frame.srcdoc = '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src \'unsafe-inline\'; '
      + 'script-src \'unsafe-inline\'; img-src data: blob:; font-src data:">' + code.querySelector('code').innerText;
    code.append(frame);
    const messages = code.closest('.messages');
    if (messages) messages.modelyardFollows = false;
    code.scrollIntoView({ block: 'start' });
  },
  // Files that are pasted or dropped anywhere in `element` go to the uploader.
  takeFiles(element, uploader) {
    if (!element || element.modelyardTakesFiles) return;
    element.modelyardTakesFiles = true;
    const add = (files) => { if (files.length) getElement(uploader).$refs.qRef.addFiles(files); };
    element.addEventListener('paste', (event) => {
      if (event.clipboardData.files.length) { event.preventDefault(); add([...event.clipboardData.files]); }
    });
    element.addEventListener('dragover', (event) => {
      if ([...event.dataTransfer.types].includes('Files')) { event.preventDefault(); element.classList.add('dropping'); }
    });
    element.addEventListener('dragleave', () => element.classList.remove('dropping'));
    element.addEventListener('drop', (event) => {
      element.classList.remove('dropping');
      if (event.dataTransfer.files.length) { event.preventDefault(); add([...event.dataTransfer.files]); }
    });
  },
};
document.addEventListener('click', (event) => {
  const preview = event.target.closest('.preview-code');
  if (preview) modelyard.preview(preview.closest('.code'), preview);
  const button = event.target.closest('.copy-code');
  if (!button) return;
  modelyard.copy(button.closest('.code').querySelector('code').innerText).then((copied) => {
    button.textContent = copied ? 'Copied' : 'Not copied';
    setTimeout(() => { button.textContent = 'Copy'; }, 1500);
  });
});
