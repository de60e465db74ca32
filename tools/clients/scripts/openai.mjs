// set-up
import OpenAI from 'openai';

const { BASE_URL, API_KEY, MODEL } = process.env;
const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: API_KEY, maxRetries: 0 });
// end
import { readFileSync } from 'node:fs';

const cancel = process.argv[2] === 'cancel';
const parameters = { type: 'object', properties: { path: { type: 'string' } }, required: ['path'] };
const tool = {
  type: 'function',
  function: { name: 'read_file', description: 'Reads a file.', parameters, parse: JSON.parse, function: ({ path }) => readFileSync(path, 'utf8') },
};
const messages = [{ role: 'user', content: process.env.PROMPT }];
const runner = client.chat.completions.runTools({ model: MODEL, messages, tools: [tool], stream: true });
let deltas = 0;
runner.on('content', (text) => {
  process.stdout.write(text);
  if (cancel && ++deltas === 5) runner.abort();
});
try {
  await runner.done();
} catch (error) {
  if (!(cancel && error instanceof OpenAI.APIUserAbortError)) throw error;
}
