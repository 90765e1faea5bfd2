import { defineConfig } from '@hey-api/openapi-ts';

// scripts/typescript_client.py sets both variables.
export default defineConfig({
  input: process.env.OPENAPI_DOCUMENT!,
  output: { path: process.env.GENERATED_FOLDER!, module: { extension: '.js' } },
  plugins: ['@hey-api/client-fetch', '@hey-api/typescript', '@hey-api/sdk'],
});
