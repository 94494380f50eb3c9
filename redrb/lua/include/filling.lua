-- Fills indexes of versions that a used task was given later.
--@include task facts pools

-- Add waiting groups to versions:<pool> and newest:<pool>, for staleness rules that the task was given later:
-- the next page of the facts. Returns whether there is more.
local function fill_indexes()
  local at = redis.call('HGET', task, 'filling')
  if not at then
    return false
  end
  local page, rule, all = redis.call('HSCAN', key('facts'), at, 'COUNT', PAGE.filled), rules(), groups()
  for i = 1, #page[2], 2 do
    local member, facts = page[2][i], unpack_facts(page[2][i + 1])
    for _, group in ipairs(all) do
      local pool = home_of(group, member, facts)
      if redis.call('ZSCORE', key('ready', pool), member) then
        if indexes_versions() and facts.version then
          redis.call('ZADD', key('versions', pool), facts.version, member)
        end
        if rule.max_token_staleness and facts.newest then
          redis.call('ZADD', key('newest', pool), facts.newest, member)
        end
      end
    end
  end
  if page[1] == '0' then
    redis.call('HDEL', task, 'filling')
    return false
  end
  redis.call('HSET', task, 'filling', page[1])
  return true
end
