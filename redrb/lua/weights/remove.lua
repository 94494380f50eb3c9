-- Delete a page of versions, until all are gone; their keys are put into the trash. Current publishers are
-- fenced. The key `fence` stays, so that no token is given twice.
-- KEYS[1] versions
-- ARGV    name
--         name: a new one, which no publisher has; the same for each page
-- Returns {more, last token that was given, id of a deleted entry ...}: with more = 1, run it again.
--         Repeated, it deletes versions committed since
--@include weights retention permissions

check_permissions(pins)
check_keys()
begin_writing()
take_over(ARGV[1])
local token = math.max(0, token_of(redis.call('HGET', fence, 'token')))
local found, reply = redis.call('XRANGE', versions, '-', '+', 'COUNT', PAGE.versions), {}
for i, entry in ipairs(found) do
  reply[i] = entry[1]
  delete_version(parsed(entry))
end
if #found == PAGE.versions then
  return {1, token, unpack(reply)}
end
discard_attempts()
redis.call('HDEL', fence, 'first')
redis.call('UNLINK', versions, manifests, pins, loads, fulls, prefix .. 'followers')
return {0, token, unpack(reply)}
