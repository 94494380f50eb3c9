-- Go on to delete versions that are no longer kept.
-- KEYS[1] versions
-- ARGV    owner, keep, max_bytes, after
--         after: as the call before returned it
-- Returns {'ok', more, after, whether the trash has keys}, as weights/commit
--       | {'fenced'}: another publisher is the owner
--@include weights retention permissions

check_permissions(pins)
check_keys()
begin_writing()
if redis.call('HGET', fence, 'owner') ~= ARGV[1] or not newest() then
  return {'fenced'}
end
return {'ok', trim(tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4])}
