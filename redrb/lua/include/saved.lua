-- What the put of a saved task stores beside its groups: docs/contributing/decisions/saving.md.
--@include task put_record facts pools groups

-- Note what consumer groups knew of the entries beyond the id `before`. A need is {number of the entry,
-- consumer group, whether it needs the entry, status that it was moved to, rule by which it expired, failed
-- deliveries, reads}; '' where there is none.
local function note_needs(needs, before)
  for _, need in ipairs(needs) do
    local number_of, group, needed, moved = unpack(need)
    local member, pool = member_of(before + number_of), waits_in(group, before + number_of)
    if pool and not needed then
      withdraw(group, pool, {member})
      add(key('group', group), 'put', -1)
    elseif pool then
      if moved ~= '' then
        withdraw(group, pool, {member})
        redis.call('HSET', key('moved', group), member, moved)
        enter(group, pool_of(group, moved), {member}, {facts_of(member)})
      end
      for i, kind in ipairs({'expiries', 'deliveries', 'reads'}) do
        if need[4 + i] ~= '' then
          redis.call('HSET', key(kind, group), member, need[4 + i])
        end
      end
    end
  end
end

-- Store dead letters: {id, consumer group, seq, source, number of words}, whose words are ARGV from `at` on.
local function store_letters(letters, at)
  for _, letter in ipairs(letters) do
    local id, group, seq, source, words = unpack(letter)
    local last = redis.pcall('XADD', key('dead'), id, unpack(ARGV, at, at + words - 1))
    if type(last) == 'table' then -- there were later letters
      last = redis.call('XADD', key('dead'), '*', unpack(ARGV, at, at + words - 1))
    end
    at = at + words
    if redis.call('SISMEMBER', key('groups'), group) == 1 then
      redis.call('ZADD', key('letters', group), seq, last)
      redis.call('ZADD', key('buried'), source, last)
      add(key('group', group), 'put', 1)
      add(key('group', group), 'dead', 1)
    end
  end
end

-- Let ids count on from where they were in the saved task: dead letters have its ids.
local function count_from(last)
  if last > last_counted() then
    redis.call('XADD', stream, id_of(last), 'g', '')
    redis.call('XDEL', stream, id_of(last))
    redis.call('HSET', puts, 'last', string.format('%d', last))
  end
end
