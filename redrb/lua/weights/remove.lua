-- Delete a page of versions, until all are gone; their keys are put into the trash. Current publishers are
-- fenced. The key `fence` stays, so that no token is given twice.
-- KEYS[1] versions
-- ARGV    the call `RemoveVersions` of redrb/weights/wire/calls.py
-- Returns the page. Repeated, it deletes versions committed since
--@include weights retention permissions

check_permissions(pins)
check_keys()
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
take_over(ask.name)
local token = math.max(0, token_of(redis.call('HGET', fence, 'token')))
local found, ids = redis.call('XRANGE', versions, '-', '+', 'COUNT', PAGE.versions), {}
for i, entry in ipairs(found) do
  ids[i] = entry[1]
  delete_version(parsed(entry))
end
if #found == PAGE.versions then
  return cmsgpack.pack({more = true, token = token, entries = ids})
end
discard_attempts()
redis.call('HDEL', fence, 'first')
redis.call('UNLINK', versions, manifests, pins, loads, fulls, asked, prefix .. 'followers')
return cmsgpack.pack({more = false, token = token, entries = ids})
