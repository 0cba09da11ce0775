// Search in pages that are opened from disk: a browser starts no worker there. This class stands in for one, and runs its
// script in a frame that is not shown. The theme's search looks for the name in the frame's parent.
if (location.protocol === "file:") {
    self.IFrameWorker = class extends EventTarget {
        constructor(address) {
            super();
            const frame = document.createElement("iframe");
            frame.hidden = true;
            document.body.append(frame);
            this.waiting = [];
            this.frame = frame;
            const inner = frame.contentWindow;
            inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data })); // from the script to the page
            inner.importScripts = (...files) => Promise.all(files.map((file) => this.load(file)));
            this.load(new URL(address, document.baseURI)).then(() => {
                const waiting = this.waiting;
                this.waiting = null;
                waiting.forEach((data) => this.postMessage(data));
            });
        }

        load(address) {
            const script = this.frame.contentDocument.createElement("script");
            script.src = address;
            return new Promise((resolve, reject) => {
                script.onload = resolve;
                script.onerror = reject;
                this.frame.contentDocument.body.append(script);
            });
        }

        postMessage(data) { // from the page to the script
            if (this.waiting) this.waiting.push(data);
            else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
        }

        terminate() {
            this.frame.remove();
        }
    };
    self.Worker = self.IFrameWorker;
}
