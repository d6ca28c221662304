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
  const button = event.target.closest('.copy-code');
  if (!button) return;
  modelyard.copy(button.closest('.code').querySelector('code').innerText).then((copied) => {
    button.textContent = copied ? 'Copied' : 'Not copied';
    setTimeout(() => { button.textContent = 'Copy'; }, 1500);
  });
});
