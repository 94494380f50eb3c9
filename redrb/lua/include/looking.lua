-- Looks through a pool in its order, a page a call.
--
-- A place is "<score> <member>" of the group that was looked at last; '0' is in front of all. Groups may come
-- and go meanwhile, so it is no rank.
--@include task facts

-- The rank of the first group behind a place: of those that have its score, the ones up to its member are in
-- front.
local function rank_behind(ready, place)
  local score, member = string.match(place, '^(%S+) (%d+)$')
  if not score then
    return 0
  end
  local low = redis.call('ZCOUNT', ready, '-inf', '(' .. score)
  local high = redis.call('ZCOUNT', ready, '-inf', score)
  while low < high do -- bound: 53, groups halved
    local middle = math.floor((low + high) / 2)
    if redis.call('ZRANGE', ready, middle, middle)[1] <= member then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

-- Call `visit` with members of a pool behind a place, and their facts, until it returns true: a page at most,
-- `first` of them first. Returns the place to go on from; nil at the end, and where `visit` has ended it.
local function look_behind(pool, place, first, visit)
  local ready, looked, step = key('ready', pool), 0, math.min(first, PAGE.matched)
  local rank, last = rank_behind(ready, place), nil
  while looked < PAGE.matched do -- bound: PAGE.matched
    local members = redis.call('ZRANGE', ready, rank + looked, rank + looked + step - 1)
    for i, facts in ipairs(facts_of_all(members)) do
      if visit(members[i], facts) then
        return nil
      end
    end
    if #members < step then
      return nil
    end
    last, looked = members[step], looked + step
    step = math.min(step * 2, PAGE.matched - looked)
  end
  return redis.call('ZSCORE', ready, last) .. ' ' .. last
end
