-- Expire groups of some statuses that are too stale, `limit` at a time: the caller repeats.
-- KEYS[1] stream
-- ARGV    group, limit, mode, version, max_staleness, max_token_staleness, status ...
--         mode: keep (move to the status expired) | discard | look (change nothing)
--         version: the newest policy version; a staleness rule that does not apply is '-'
-- Returns {'ok', groups expired, seq ...}: the seqs of groups that would expire, by look
--       | {'unversioned'}: the task has no index of versions for such a rule
--       | {'gone'}: there is no such task | {'more'}: the consumer group is joining, run it again
--@include task facts waking staleness membership permissions

check_permissions(KEYS[1])
begin_writing()
if not exists() then
  return {'gone'}
end
local group, limit, version = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4])
local rule = rules()
local by_version, by_token = tonumber(ARGV[5]), tonumber(ARGV[6])
if (by_version and not rule.max_staleness and rule.order ~= 'stalest')
  or (by_token and not rule.max_token_staleness) then
  return {'unversioned'}
end
if not join(group) then
  return {'more'}
end
local cut = by_version and version - by_version - 1
local token_cut = by_token and version - by_token - 1
if ARGV[3] == 'look' then
  local found = {'ok', 0}
  for i = 7, #ARGV do
    for _, member in ipairs(overdue(pool_of(group, ARGV[i]), cut, token_cut, limit)) do
      found[#found + 1] = tonumber(member)
    end
  end
  return found
end
local note = ARGV[3] == 'keep' and expiry_note(ARGV[4], ARGV[5], ARGV[6])
local expired = 0
for i = 7, #ARGV do
  if expired < limit then
    expired = expired + expire_pool(group, ARGV[i], cut, token_cut, limit - expired, note)
  end
end
if expired > 0 then
  wake_room()
  wake_entered()
end
return {'ok', expired}
